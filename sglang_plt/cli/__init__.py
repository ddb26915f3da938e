"""The console command ``sglang-plt``.

A command is a module of this package with ``NAME``, ``HELP`` (one line), ``add_arguments(parser)`` and
``run(args) -> int`` (the exit status), listed in :data:`COMMANDS`. Such a module imports what is slow (torch, sglang)
inside ``run``, so that ``sglang-plt --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang_plt import __version__
from sglang_plt.cli.errors import UserError

COMMANDS = {
    "bits": "sglang_plt.cli.bits",
    "calibrate": "sglang_plt.cli.calibrate",
    "delta-pairs": "sglang_plt.cli.delta_pairs",
    "demo": "sglang_plt.cli.demo",
    "demo-model": "sglang_plt.cli.demo_model",
    "kl": "sglang_plt.cli.kl",
    "rate-distortion": "sglang_plt.cli.rate_distortion",
    "simulate": "sglang_plt.cli.simulate",
    "tree": "sglang_plt.cli.tree",
}
"""Name of a command -> the module that is it."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see: {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command in :data:`COMMANDS`; parsing raises :class:`UserError` instead of printing usage."""
    parser = _Parser(prog="sglang-plt", description="A prefix cache for SGLang that keeps evicted context compressed.")
    parser.add_argument("--version", action="version", version=f"sglang-plt {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        command = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; ``sys.argv`` when None.

    Returns:
        The exit status: what the command returned, 2 after a :class:`UserError` (one line on stderr), 130 after Ctrl-C.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (status 0), as argparse does.
    """
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except UserError as error:
        print(f"sglang-plt: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-plt: interrupted", file=sys.stderr)
        return 130
