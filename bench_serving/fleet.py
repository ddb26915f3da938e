"""A fleet of agents with near-identical system prompts: bytes, hits, latency and divergence by the way of caching.

    python -m bench_serving.fleet [--sessions 16] [--turns 2] [--arms radix raw ...] [--json FILE]

Two measurements, never mixed. An arm by its plain name has a pool for about a quarter of the working set and, where it
has a cold tier, one that holds everything: how many bytes that takes, and what comes back of it. An arm with
``@equal-bytes`` has pool and cold tier of a quarter of the working set together, which is what ``radix`` has in its
pool alone: what that buys.

``bf16_over_bytes_*``, ``hit_rate``, ``ttft_p50_ms``, ``kl_warm_cold`` and the others are explained in
:mod:`bench_serving.fleet_runs` and :mod:`bench_serving.metrics`. The first measurement evicts by age and encodes when
it evicts, so that bytes can be counted; the second runs with the defaults.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench_serving.fleet_runs import (
    EQUAL_BYTES,
    FleetError,
    Plan,
    Reference,
    measuring_run,
    plain_run,
    reference_run,
    refuse_without_profile,
)
from bench_serving.servers import Arm
from bench_serving.workloads import ModelTokenizer
from bench_serving.workloads.fleet import Fleet
from sglang_plt.cli.errors import UserError
from sglang_plt.client import RequestError
from sglang_plt.config import PROFILED
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model
from sglang_plt.results import Row, write_rows
from sglang_plt.serving import ServerProcess, ServerStartError

ARMS = ("radix", "raw", "int4", "dense", "dense+delta", "fast+delta")
COLUMNS = (
    ("bf16_over_bytes_template", "template", ".2f"),
    ("bf16_over_bytes_overall", "overall", ".2f"),
    ("kl_warm_cold", "KL >=", ".6f"),
    ("hit_rate", "hit rate", ".1%"),
    ("ttft_p50_ms", "TTFT p50 ms", ".0f"),
    ("exact_match", "same output", ".1%"),
    ("failed_share", "failed", ".1%"),
)


def parse_arm(name: str) -> Arm:
    """``radix`` is SGLang's default; the ``plt-`` of the other names of :class:`Arm` may be left out.

    Raises:
        ValueError: there is no such arm.
    """
    whole = name.partition("-")[0] in ("plt", "sglang")
    return Arm.parse("default" if name == "radix" else name if whole else f"plt-{name}")


def run(plan: Plan, arms: Sequence[str], *, equal_bytes: bool = True) -> Iterator[list[Row]]:
    """Start server after server; the rows of each, as they are done.

    Arms that need a profile come first: should one lack it, that shows at once.

    Raises:
        ServerStartError, FleetError, RequestError, OSError: and everything ends.
    """
    yield [
        Row("working_set_tokens", "fleet", plan.working_set, "tokens"),
        Row("pool_tokens", "fleet", plan.pool_tokens, "tokens"),
        Row("row_bytes", "fleet", plan.half.row_bytes, "bytes"),
    ]
    with _started(plan.reference_server(), "reference") as server:
        reference = reference_run(plan, server, _saying("reference"))
    for name in sorted(arms, key=lambda name: parse_arm(name).codec not in PROFILED):
        yield from _run_arm(plan, name, reference, equal_bytes)


def _run_arm(plan: Plan, name: str, reference: Reference, equal_bytes: bool) -> Iterator[list[Row]]:
    arm, equal = parse_arm(name), name + EQUAL_BYTES
    if not arm.has_cold_tier:  # its pool is all it has: one run is both
        with _started(plan.equal_server(arm), name) as server:
            rows = plain_run(plan, server, name, reference, _saying(name))
        yield rows
        if equal_bytes:
            yield [Row(row.metric, equal, row.value, row.unit, row.lo, row.hi, row.n) for row in rows]
        return
    with _started(plan.measuring_server(arm), name) as server:
        refuse_without_profile(server, arm)
        yield measuring_run(plan, server, name, reference, _saying(name))
    if equal_bytes:
        with _started(plan.equal_server(arm), equal) as server:
            yield plain_run(plan, server, equal, reference, _saying(equal))


def _started(server: ServerProcess, name: str) -> ServerProcess:
    _say(f"{name}: starting a server, log: {server.log_path}")
    return server


def table(rows: Sequence[Row]) -> str:
    """A line an arm; a dash where it has no such number."""
    found = {(row.metric, row.arm): row.value for row in rows}
    arms = [arm for arm in dict.fromkeys(row.arm for row in rows) if ("hit_rate", arm) in found]
    width = max(map(len, arms), default=0) + 2
    lines = ["arm".ljust(width) + "".join(title.rjust(13) for _, title, _ in COLUMNS)]
    for arm in arms:
        values = [(found.get((metric, arm)), form) for metric, _, form in COLUMNS]
        cells = ["-" if value is None else format(value, form) for value, form in values]
        lines.append(arm.ljust(width) + "".join(cell.rjust(13) for cell in cells))
    lines.append("template, overall: bytes as bfloat16 over bytes held, of the system prompts and of everything")
    lines.append("KL: nats a token behind restored system prompts, a lower bound from the most probable tokens")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench_serving.fleet")
    parser.add_argument("--sessions", type=int, default=16, help="agents (default: 16)")
    parser.add_argument("--turns", type=int, default=2, help="requests of each (default: 2)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", default=ARMS, help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--no-equal-bytes", action="store_true", help="leave out the second measurement")
    parser.add_argument("--model-path", type=Path, help=f"model directory (default: {DEFAULT_DEMO_MODEL}, fetched)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well, after every server")
    args = parser.parse_args(argv)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    rows: list[Row] = []
    try:
        fleet = Fleet(args.sessions, args.turns, seed=args.seed)
        for name in args.arms:
            parse_arm(name)
        model_path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        plan = Plan.make(model_path, ModelTokenizer(model_path), fleet, on_gpu=_has_gpu())
        _say(f"{args.sessions} sessions, {plan.working_set} tokens, pools of {plan.pool_tokens}")
        for more in run(plan, args.arms, equal_bytes=not args.no_equal_bytes):
            rows += more
            if args.json is not None:
                write_rows(args.json, rows)
    except (DemoModelError, FleetError, RequestError, ServerStartError, UserError, ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    print(table(rows))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _saying(name: str) -> Callable[[str], None]:
    return lambda line: _say(f"{name}: {line}")


def _say(line: str) -> None:
    print(f"fleet: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
