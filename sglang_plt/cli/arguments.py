"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_plt.cli.errors import UserError
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL


def add_model_path(parser: argparse.ArgumentParser) -> None:
    """``--model-path``; None stands for the demo model."""
    parser.add_argument(
        "--model-path",
        metavar="DIR",
        type=Path,
        help=f"model directory (default: the demo model in {DEFAULT_DEMO_MODEL}, fetched when missing)",
    )


def check_model_path(args: argparse.Namespace) -> None:
    """Refuse a ``--model-path`` that holds no model."""
    if args.model_path is not None and not (args.model_path / "config.json").is_file():
        raise UserError(f"--model-path={args.model_path} is not a model directory: it has no config.json")
