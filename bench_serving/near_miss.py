"""Prompts that differ by a date and a name near their top: reuse of the rest beside computing all of it.

    python -m bench_serving.near_miss [--prompt-tokens 2000 6000] [--json FILE] [--plot FILE]

One server with ``--plt-near-miss on`` and ``--plt-near-miss-override on``. A donor prompt is served, then prompts that
differ from it are asked for in turn with reuse, without (``off``), and as an exact hit: a prefix of the donor that
leaves as many tokens to compute as reuse did. Every prompt is new. Times are those of requests with one output token.

``ttft_ratio_vs_off``, ``ttft_ratio_vs_exact_hit``: medians over medians, intervals by drawing rounds. ``kl``,
``argmax_agreement``: of the distributions behind every token of a continuation, reuse against ``off``, the first a
lower bound (see :mod:`bench_serving.divergence`). ``grafted_share``: tokens reused over tokens of the prompt.
``ttft_ratio_unrelated``: prompts without a relative, ``on`` against ``off``. ``deviation_*``: of the rows themselves,
as ``report`` predicts and measures it. Arms are ``<workload>/<nominal prompt tokens>``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from bench_serving.divergence import kl_lower_bound, teacher_forced
from bench_serving.near_miss_prompts import Prompts
from bench_serving.servers import Budget, make_server, pool_dtype, values_a_token
from bench_serving.workloads import ModelTokenizer
from sglang_plt.cli.errors import UserError
from sglang_plt.client import Client, RequestError
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model
from sglang_plt.results import Row, write_rows
from sglang_plt.serving import ServerProcess, ServerStartError

WORKLOAD = "near_duplicates"
ON, OFF, REPORT = ({"plt_near_miss": mode} for mode in ("on", "off", "report"))
_REPORTED = re.compile(r"near-miss: tokens (\d+) to (\d+) .* predicted deviation ([\d.e+-]+), measured ([\d.e+-]+)")
_CONTINUATION = 128


def timed(client: Client, ids: Sequence[int], custom: dict[str, str]) -> tuple[float, int, int]:
    """Seconds to the first token, tokens found in the cache, and those of another prompt among them."""
    sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True, "custom_params": custom}
    started = perf_counter()
    meta = client.post_json("/generate", {"input_ids": list(ids), "sampling_params": sampling})["meta_info"]
    seconds = perf_counter() - started
    return seconds, meta["cached_tokens"], (meta.get("cached_tokens_details") or {}).get("near_miss", 0)


def measure_times(client: Client, prompts: Prompts, rounds: int, rng: np.random.Generator) -> list[Row]:
    """Times of one length, and of prompts without a relative."""
    arm = f"{WORKLOAD}/{prompts.length}"
    timed(client, prompts.donor, OFF)
    found: dict[str, list[float]] = {name: [] for name in ("on", "off", "hit", "unrelated on", "unrelated off")}
    shares = []
    for _ in range(rounds):
        ids = prompts.variant()
        seconds, cached, grafted = timed(client, ids, ON)
        found["on"].append(seconds)
        shares.append(grafted / len(ids))
        others = {
            "off": (prompts.variant(), OFF),
            "hit": (prompts.exact_hit(len(ids) - cached), OFF),
            "unrelated on": (prompts.unrelated(), ON),
            "unrelated off": (prompts.unrelated(), OFF),
        }
        for name in rng.permutation(list(others)):
            found[name].append(timed(client, *others[name])[0])
    rows = [_ratio("ttft_ratio_vs_off", arm, found["on"], found["off"], rng)]
    rows.append(_ratio("ttft_ratio_vs_exact_hit", arm, found["on"], found["hit"], rng))
    rows.append(_ratio("ttft_ratio_unrelated", arm, found["unrelated on"], found["unrelated off"], rng))
    rows.append(Row("grafted_share", arm, float(np.mean(shares)), "fraction", n=rounds))
    names = {"on": "ttft_on_ms", "off": "ttft_off_ms", "hit": "ttft_exact_hit_ms"}
    rows += [Row(names[name], arm, 1000 * float(np.median(found[name])), "ms", n=rounds) for name in names]
    return rows


def measure_divergence(client: Client, prompts: Prompts, num_tokens: int) -> list[Row]:
    """Distributions behind prompts with reused rows against exact ones."""
    arm, kls, equal = f"{WORKLOAD}/{prompts.length}", [], []
    for number in range(-(-num_tokens // _CONTINUATION)):
        ids, behind = prompts.variant(), prompts.continuation(number, _CONTINUATION)
        reused, exact = (teacher_forced(client, ids, behind, custom_params=custom) for custom in (ON, OFF))
        kls += [kl_lower_bound(p, q) for p, q in zip(exact, reused, strict=True)]
        equal += [max(p, key=p.get) == max(q, key=q.get) for p, q in zip(exact, reused, strict=True)]  # type: ignore[arg-type]
    return [
        Row("kl", arm, float(np.mean(kls)), "nats", n=len(kls)),
        Row("argmax_agreement", arm, float(np.mean(equal)), "fraction", n=len(equal)),
    ]


def measure_deviation(server: ServerProcess, prompts: Prompts) -> list[tuple[float, float]]:
    """``(predicted, measured)`` of rows that were not reused, for prompts with more and more changes."""
    before = len(_REPORTED.findall(server.log_text()))
    for changes in (1, 1, 2, 3, 4, 6, 8):
        timed(server, prompts.changed(changes), REPORT)
    return [(float(p), float(m)) for _, _, p, m in _REPORTED.findall(server.log_text())[before:]]


def _ratio(metric: str, arm: str, ours: list[float], theirs: list[float], rng: np.random.Generator) -> Row:
    one, other = np.array(ours), np.array(theirs)
    draws = rng.integers(0, len(one), (2000, len(one)))
    ratios = np.median(one[draws], 1) / np.median(other[draws], 1)
    lo, hi = (float(np.quantile(ratios, share)) for share in (0.025, 0.975))
    return Row(metric, arm, float(np.median(one) / np.median(other)), "ratio", lo, hi, len(one))


def plot(points: Sequence[tuple[float, float]], path: Path) -> None:
    """Measured against predicted deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 4), layout="constrained")
    predicted, measured = np.array(points).T
    axis.loglog(predicted, measured, "o", color="tab:blue")
    low, high = min(predicted.min(), measured.min()), max(predicted.max(), measured.max())
    axis.loglog([low, high], [low, high], "--", color="grey", linewidth=1)
    axis.set_xlabel("predicted deviation of reused rows")
    axis.set_ylabel("measured, share of the rows' squared length")
    axis.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench_serving.near_miss")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[2000, 6000], help="default: 2000 6000")
    parser.add_argument("--rounds", type=int, default=5, help="of the times (default: 5)")
    parser.add_argument("--tokens", type=int, default=2048, help="whose distributions are compared (default: 2048)")
    parser.add_argument("--model-path", type=Path, help=f"model directory (default: {DEFAULT_DEMO_MODEL}, fetched)")
    parser.add_argument("--codec", default="int8", help="of the cold tier (default: int8)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--plot", type=Path, help="draw the deviation of rows, predicted and measured")
    args = parser.parse_args(argv)
    if min(args.prompt_tokens) < 600 or args.rounds < 2 or args.tokens < 1:
        parser.error("--prompt-tokens must be at least 600, --rounds 2 and --tokens 1")
    for option in ("json", "plot"):
        path = getattr(args, option)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{option}={path}: {path.absolute().parent} is not a directory")
    try:
        rows, points = _run(args)
    except (DemoModelError, ServerStartError, RequestError, UserError, OSError, ValueError) as error:
        raise SystemExit(f"near_miss: {error}") from error
    if args.json is not None:
        write_rows(args.json, rows)
    if args.plot is not None and points:
        plot(points, args.plot)
    for row in rows:
        interval = f"  [{row.lo:.4g}, {row.hi:.4g}]" if row.lo is not None else ""
        print(f"{row.arm:24}{row.metric:28}{row.value:12.5g} {row.unit}{interval}  n={row.n}")


def _run(args: argparse.Namespace) -> tuple[list[Row], list[tuple[float, float]]]:
    import torch

    on_gpu = torch.cuda.is_available()
    model = args.model_path or ensure_demo_model()
    tokenizer, rng = ModelTokenizer(model), np.random.default_rng(args.seed)
    row_bytes = values_a_token(model) * pool_dtype(on_gpu)[1]
    pool = 12 * (max(args.prompt_tokens) + 1024)
    budget = Budget(pool, 2 * pool * row_bytes, row_bytes)
    flags = ["--model-path", str(model), "--dtype", pool_dtype(on_gpu)[0], "--random-seed", "0"]
    flags += [] if on_gpu else ["--device", "cpu", "--disable-cuda-graph", "--max-running-requests", "4"]
    flags += ["--max-total-tokens", str(budget.pool_tokens), "--radix-cache", "plt", "--plt-codec", args.codec]
    flags += ["--plt-cold-bytes", str(budget.cold_bytes), "--plt-near-miss", "on", "--plt-near-miss-override", "on"]
    rows: list[Row] = []
    points: list[tuple[float, float]] = []
    server = make_server(flags, on_gpu=on_gpu)
    print(f"near_miss: starting a server, log: {server.log_path}", file=sys.stderr)
    with server:
        for length in args.prompt_tokens:
            server.flush_cache()
            prompts = Prompts(tokenizer, length, args.seed)
            print(f"near_miss: {length} tokens: times", file=sys.stderr)
            rows += measure_times(server, prompts, args.rounds, rng)
            print(f"near_miss: {length} tokens: distributions", file=sys.stderr)
            rows += measure_divergence(server, prompts, args.tokens)
            found = measure_deviation(server, prompts)
            points += found
            arm = f"{WORKLOAD}/{length}"
            for name, values in zip(("predicted", "measured"), zip(*found, strict=True), strict=False):
                rows.append(Row(f"deviation_{name}", arm, float(np.median(values)), "fraction", n=len(values)))
    return rows, points


if __name__ == "__main__":
    main()
