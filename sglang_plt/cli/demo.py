"""``sglang-plt demo``: shows, on a small server of its own, what the cold tier saves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_plt.cli.arguments import check_model_path
from sglang_plt.cli.errors import UserError
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL

NAME = "demo"
_SHOWN_LOG_LINES = 12
HELP = "Serve chats of several users from a KV pool that is too small for them and show what the cold tier restores."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-path",
        metavar="DIR",
        type=Path,
        help=f"model directory to serve (default: the demo model in {DEFAULT_DEMO_MODEL}, fetched when missing)",
    )
    parser.add_argument(
        "--codec", choices=(*CODECS, *PROFILED), default="int8", help="how evicted KV is stored (default: int8)"
    )
    parser.add_argument("--users", metavar="N", type=int, default=6, help="conversations (default: 6)")
    parser.add_argument("--turns", metavar="N", type=int, default=3, help="questions of each user (default: 3)")
    parser.add_argument(
        "--max-total-tokens",
        metavar="N",
        type=int,
        help="size of the KV pool (default: such that the conversations fill it about 3.5 times)",
    )
    parser.add_argument("--port", metavar="PORT", type=int, help="loopback port of the server (default: a free one)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")


def run(args: argparse.Namespace) -> int:
    from sglang_plt.demo import HEADER, DemoError, DemoOptions, run_demo, table_line
    from sglang_plt.demo_model import DemoModelError, ensure_demo_model
    from sglang_plt.results import write_rows
    from sglang_plt.serving import CALM_THREADS, ServerProcess, ServerStartError

    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise UserError(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    check_model_path(args)
    try:
        options = DemoOptions(
            model_path=args.model_path or DEFAULT_DEMO_MODEL,
            codec=args.codec,
            users=args.users,
            turns=args.turns,
            max_total_tokens=args.max_total_tokens,
        )
        if args.model_path is None:
            ensure_demo_model(options.model_path)
        on_gpu = _has_gpu()
        server = ServerProcess(
            options.server_args(on_gpu), port=args.port, env={} if on_gpu else CALM_THREADS, progress=_Progress()
        )
        _say(f"starting SGLang on port {server.port}; log: {server.log_path}")
        with server:
            _say(f"ready: {options.users} users, {options.turns} turns, a pool of {options.pool_tokens} tokens")
            print(HEADER, flush=True)
            result = run_demo(options, server, lambda turn: print(table_line(turn), flush=True))
    except ServerStartError as error:
        for line in error.tail[-_SHOWN_LOG_LINES:]:
            print(f"  | {line}", file=sys.stderr)
        raise UserError(error.summary) from error
    except (DemoError, DemoModelError) as error:
        raise UserError(str(error)) from error
    print("\n" + "\n".join(result.summary()))
    print("\nthe first conversation:\n" + "\n".join(result.sample()))
    if args.json is not None:
        try:
            write_rows(args.json, result.rows())
        except OSError as error:
            raise UserError(f"--json={args.json} cannot be written: {error.strerror}") from error
        _say(f"wrote {args.json}")
    _say(f"stopped the server; its log is {server.log_path}")
    return 0


def _say(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class _Progress:
    """A line every ten seconds while the server starts."""

    def __init__(self) -> None:
        self._due = 10.0

    def __call__(self, seconds: float, line: str) -> None:
        if seconds >= self._due:
            self._due += 10
            # "[date time] message" of SGLang's own logger; the rest is warnings and our polling
            stage = line.partition("] ")[2] if line.startswith("[") and "GET /" not in line else ""
            _say(f"{seconds:.0f} s ... {stage[:90]}".rstrip())
