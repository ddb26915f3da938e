"""``sglang-plt simulate``: what each eviction policy would have hit on a request trace."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_plt.cli.errors import UserError

if TYPE_CHECKING:
    from sglang_plt.simulate.replay import Result, Settings
    from sglang_plt.simulate.trace import Trace

NAME = "simulate"
HELP = "Replay request traces over the trie and the eviction policies and show what would have been hit."
_POLICIES = ("value", "lru", "lfu", "slru", "fifo", "tlru", "belady")
_SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_COUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kMG]?)", re.ASCII)
_MAX_COUNT = 1 << 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="+",
        type=Path,
        help="JSONL in Mooncake's format or with tokens",
    )
    parser.add_argument(
        "--capacity",
        metavar="N",
        nargs="+",
        default=["1M"],
        help="bytes of the cache as tokens at full precision, for example 500k or 2M (default: 1M)",
    )
    parser.add_argument(
        "--policy",
        metavar="P",
        nargs="+",
        choices=_POLICIES,
        default=["value", "lru", "belady"],
        help=f"of {', '.join(_POLICIES)}; belady knows the future (default: value lru belady)",
    )
    parser.add_argument(
        "--codec-ratio",
        metavar="X",
        nargs="+",
        default=["1"],
        help="tokens held in the bytes of one at full precision; above 1, hits are restored (default: 1)",
    )
    parser.add_argument("--page-tokens", metavar="N", default="16", help="page of a token-level trace (default: 16)")
    parser.add_argument("--token-bytes", metavar="N", default="131072", help="bytes of a token (default: 131072)")
    parser.add_argument("--prefill-rate", metavar="N", default="10k", help="prefilled tokens a second (default: 10k)")
    parser.add_argument("--restore-rate", metavar="N", default="200k", help="restored tokens a second (default: 200k)")
    parser.add_argument(
        "--replay-tokens", metavar="N", default="16M", help="evicted tokens whose keys are kept (default: 16M)"
    )
    parser.add_argument(
        "--tlru-threshold", metavar="N", default="2048", help="tokens that tlru may recompute (default: 2048)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers to FILE")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw the hit rates, for example to hits.png")
    parser.add_argument(
        "--generate", choices=["agents"], help="write a trace of agent sessions to TRACE instead of reading it"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of --generate (default: 0)")
    parser.add_argument("--requests", metavar="N", default="10k", help="of --generate (default: 10k)")


def run(args: argparse.Namespace) -> int:
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"--{option}={path}: {path.absolute().parent} is not a directory")
    if args.generate is not None:
        return _generate(args)

    from sglang_plt.results import write_rows
    from sglang_plt.simulate.replay import Settings
    from sglang_plt.simulate.report import PlotError, plot, rows

    capacities = [_count(text, "capacity") for text in args.capacity]
    ratios = [_ratio(text) for text in args.codec_ratio]
    settings = Settings(
        **{
            name: _count(getattr(args, name), name.replace("_", "-"))
            for name in ("token_bytes", "prefill_rate", "restore_rate", "replay_tokens", "tlru_threshold")
        }
    )
    traces = [_read(path, _count(args.page_tokens, "page-tokens")) for path in dict.fromkeys(args.traces)]
    names = [trace.name for trace in traces]
    if len(set(names)) < len(names):
        raise UserError(f"two traces are called {max(names, key=names.count)}; rename one, or their rows look the same")
    for capacity in capacities:
        for trace in traces:
            if capacity * min(ratios) < trace.unit_tokens:
                raise UserError(
                    f"--capacity={capacity} does not hold one unit of {trace.unit_tokens} tokens of {trace.name}"
                )
    results = _simulate(traces, args.policy, capacities, ratios, settings)
    if args.json is not None:
        try:
            write_rows(args.json, rows(results))
        except OSError as error:
            raise UserError(f"--json={args.json} cannot be written: {error.strerror}") from error
    if args.plot is not None:
        try:
            plot(args.plot, results)
        except PlotError as error:
            raise UserError(f"--plot={args.plot} {error}") from error
        except OSError as error:
            raise UserError(f"--plot={args.plot} cannot be written: {error.strerror}") from error
    return 0


def _simulate(
    traces: list[Trace], policies: list[str], capacities: list[int], ratios: list[Fraction], settings: Settings
) -> list[Result]:
    from sglang_plt.simulate.replay import simulate
    from sglang_plt.simulate.report import table_header, table_line

    print(table_header(), flush=True)
    results = []
    for trace in traces:
        for ratio in dict.fromkeys(ratios):
            for capacity in dict.fromkeys(capacities):
                for policy in dict.fromkeys(policies):
                    with _progress(len(trace.requests), f"{trace.name} {policy} {capacity} x{float(ratio):g}") as bar:
                        results.append(simulate(trace, policy, capacity, ratio, settings, bar.update))
                    print(table_line(results[-1]), flush=True)
    return results


def _progress(total: int, label: str) -> Any:
    """A progress bar on stderr, gone when done; nothing where stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=label, unit="req", leave=False, disable=None, mininterval=0.5)


def _generate(args: argparse.Namespace) -> int:
    from sglang_plt.simulate.agents import write_agents

    if len(args.traces) != 1:
        raise UserError(f"--generate={args.generate} writes one trace, {len(args.traces)} files were named")
    path = args.traces[0]
    try:
        write_agents(path, args.seed, _count(args.requests, "requests"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    print(path)
    return 0


def _read(path: Path, page_tokens: int) -> Trace:
    from sglang_plt.simulate.trace import TraceError, read_trace

    try:
        return read_trace(path, page_tokens)
    except TraceError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _count(text: str, option: str) -> int:
    match = _COUNT.fullmatch(text)
    count = Fraction(match[1]) * _SUFFIXES[match[2]] if match else Fraction(0)
    if count.denominator != 1 or not 1 <= count <= _MAX_COUNT:
        raise UserError(f"--{option}={text} must be a whole number, at least 1, for example 500000, 500k or 2M")
    return int(count)


def _ratio(text: str) -> Fraction:
    ratio = Fraction(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text, re.ASCII) else Fraction(0)
    if ratio < 1:
        raise UserError(f"--codec-ratio={text} must be a number, at least 1, for example 4 or 7.5")
    return ratio
