"""How fast evicted KV comes back: restore beside a copy of the same bytes and beside computing the tokens again.

    python -m bench_serving.restore [--json FILE] [--model-path M] [--prefill sglang|transformers] [--rounds 15]

The rows are the KV of real text under the model. In every round all arms move the same tokens, in a new order, and one
prompt is prefilled, so that a busy machine slows all of them alike. An arm restores blocks of 256 rows into scattered
slots of a KV pool as SGLang makes it, checksums included; ``memcpy`` copies the reconstructed bytes from a contiguous
host buffer into the same slots, which is what a host tier that does not encode would do (the faster of two ways);
``contiguous_copy`` copies them from one buffer to another, a bound that no tier of copies can reach.
Restores and copies run on one thread, a prefill on all of them. Arms are codecs over a float32 pool; ``/bfloat16``
marks the same over a bfloat16 pool, whose prefill is that of the float32 server.

``evict_step`` and ``restore_step`` are what one call adds to a scheduling step of our cache, with the next block
already written and without.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from bench_serving import restore_steps
from bench_serving.restore_arms import CONTIGUOUS, MEMCPY, Mover, Sequences, SGLangPrefill, transformers_prefill
from sglang_plt.config import CODECS
from sglang_plt.demo_model import DEFAULT_DEMO_MODEL, DemoModelError, ensure_demo_model
from sglang_plt.quality import QualityError
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import builtin_windows
from sglang_plt.results import Row, write_rows
from sglang_plt.serving import ServerStartError

DTYPES = {"": torch.float32, "/bfloat16": torch.bfloat16}
"""Suffix of an arm -> dtype of its pool."""
TARGETS = {"restore_vs_memcpy": ("int4", 0.25), "restore_vs_prefill": ("int4", 40.0)}
PROMPTS, PROMPT_TOKENS = 4, 1024
STEP_CODEC = "int8"

Rates = dict[str, dict[str, list[float]]]
"""``[restore | encode | memcpy | prefill][arm]`` -> tokens a second, one entry a round."""


def measure(
    sequences: Sequences,
    prefill: Callable[[int], float],
    rounds: int,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda index: None,
) -> Rates:
    """Run the rounds.

    Args:
        prefill: tokens a second of prompt ``index``.
        on_round: called after each round.
    """
    rng = np.random.default_rng(seed)
    movers = {suffix: Mover(sequences, dtype) for suffix, dtype in DTYPES.items()}
    arms: list[tuple[str, str, Callable[[], float]]] = []
    for suffix, mover in movers.items():
        for codec in CODECS:
            arms.append(("restore", codec + suffix, _rate(mover, mover.restore, codec)))
            arms.append(("encode", codec + suffix, _rate(mover, mover.encode, codec)))
        arms += [("memcpy", arm + suffix, _rate(mover, mover.restore, arm)) for arm in (*MEMCPY, CONTIGUOUS)]
    rates: Rates = {"prefill": {"prefill": []}, "restore": {}, "encode": {}, "memcpy": {}}
    for what, arm, _ in arms:
        rates[what][arm] = []
    for index in range(rounds):
        rates["prefill"]["prefill"].append(prefill(index))
        for choice in rng.permutation(len(arms)):  # no arm always runs on the caches that another one left
            what, arm, run = arms[choice]
            rates[what][arm].append(run())
        on_round(index)
    return rates


def _rate(mover: Mover, move: Callable[[str], object], arm: str) -> Callable[[], float]:
    def run() -> float:
        started = perf_counter()
        move(arm)
        return mover.num_rows / (perf_counter() - started)

    return run


def rows_of(rates: Rates, steps: dict[str, dict[str, list[float]]], seed: int = 0) -> list[Row]:
    """Medians, ratios of medians and quantiles, each with a bootstrap interval of 95 %; ratios draw rounds in pairs."""
    rng = np.random.default_rng(seed)
    found = {what: {arm: np.array(values) for arm, values in arms.items()} for what, arms in rates.items()}
    prefill = found["prefill"]["prefill"]
    draws = rng.integers(0, len(prefill), (2000, len(prefill)))

    def ratio(metric: str, arm: str, ours: np.ndarray, theirs: np.ndarray) -> Row:
        lo, hi = _interval(np.median(ours[draws], axis=1) / np.median(theirs[draws], axis=1))
        return Row(metric, arm, float(np.median(ours) / np.median(theirs)), "ratio", lo, hi, len(ours))

    rows = []
    for suffix in DTYPES:
        copies = [found["memcpy"][arm + suffix] for arm in MEMCPY]
        memcpy = max(copies, key=lambda values: float(np.median(values)))
        contiguous = found["memcpy"][CONTIGUOUS + suffix]
        for codec in CODECS:
            ours = found["restore"][codec + suffix]
            rows.append(ratio("restore_vs_memcpy", codec + suffix, ours, memcpy))
            rows.append(ratio("restore_vs_contiguous_copy", codec + suffix, ours, contiguous))
            rows.append(ratio("restore_vs_prefill", codec + suffix, ours, prefill))
    for what, arms in found.items():
        for arm, values in arms.items():
            lo, hi = _interval(np.median(values[draws], axis=1))
            rows.append(Row(f"{what}_tokens_per_s", arm, float(np.median(values)), "tokens/s", lo, hi, len(values)))
    for what, timed in steps.items():
        for arm, seconds in timed.items():
            millis = 1000 * np.array(seconds)
            sample = millis[rng.integers(0, len(millis), (2000, len(millis)))]
            for quantile in (50, 99):
                lo, hi = _interval(np.percentile(sample, quantile, axis=1))
                value = float(np.percentile(millis, quantile))
                rows.append(Row(f"{what}_p{quantile}_ms", arm, value, "ms", lo, hi, len(millis)))
    return rows


def _interval(estimates: np.ndarray) -> tuple[float, float]:
    return float(np.percentile(estimates, 2.5)), float(np.percentile(estimates, 97.5))


def table(rows: Sequence[Row]) -> str:
    """All rows, and how the targets stand."""
    lines = []
    for row in rows:
        digits = 0 if row.unit == "tokens/s" else 3
        interval = "" if row.lo is None else f"[{row.lo:.{digits}f}, {row.hi:.{digits}f}]"
        lines.append(f"{row.metric:28}{row.arm:27}{row.value:>12.{digits}f} {row.unit:9}{interval:26}n={row.n}")
    found = {(row.metric, row.arm): row.value for row in rows}
    for metric, (arm, target) in TARGETS.items():
        value = found[metric, arm]
        lines.append(f"{metric} of {arm}: {value:.3g}, target {target:g}: {'met' if value >= target else 'MISSED'}")
    return "\n".join(lines)


def collect(model: ReferenceModel) -> tuple[Sequences, list[list[int]]]:
    """The KV of the built-in text, and its prompts."""
    windows = builtin_windows(model.tokenizer, PROMPTS, PROMPT_TOKENS)
    parts = [model.prefill(window.ids) for window in windows]
    layers = range(len(parts[0].keys))
    rows = Rows(
        tuple(torch.cat([part.keys[layer] for part in parts]) for layer in layers),
        tuple(torch.cat([part.values[layer] for part in parts]) for layer in layers),
    )
    return Sequences(rows, PROMPT_TOKENS, model.rotary(PROMPT_TOKENS)), [window.ids for window in windows]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench_serving.restore")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--model-path", type=Path, help=f"model directory (default: {DEFAULT_DEMO_MODEL}, fetched)")
    parser.add_argument("--prefill", choices=("sglang", "transformers"), default="sglang", help="who prefills")
    parser.add_argument("--rounds", type=int, default=15, help="of the throughput arms (default: 15)")
    parser.add_argument("--steps", type=int, default=400, help="evictions and restores of each kind (default: 400)")
    args = parser.parse_args(argv)
    if args.rounds < 2 or args.steps < 2:
        parser.error(f"--rounds={args.rounds} and --steps={args.steps} must be at least 2")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json={args.json}: {args.json.absolute().parent} is not a directory")
    if (load := os.getloadavg()[0]) > 1:
        # threads of a prefill wait for one another, so that it suffers more than a restore on one thread
        _say(f"the machine is busy (load {load:.1f}): restore_vs_prefill will flatter; repeat when it is quiet")
    try:
        model_path = args.model_path or ensure_demo_model(DEFAULT_DEMO_MODEL)
        model = ReferenceModel(model_path)
        _say(f"computing the KV of {PROMPTS} texts of {PROMPT_TOKENS} tokens")
        sequences, prompts = collect(model)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        _say("what a restore and an eviction add to a step")
        steps = restore_steps.measure(sequences, STEP_CODEC, args.steps)
        prefill: AbstractContextManager[Callable[[int], float]]
        if args.prefill == "sglang":
            _say("starting SGLang for the prefill")
            prefill = SGLangPrefill(model_path, prompts)
        else:
            prefill = nullcontext(transformers_prefill(model, prompts, threads))
        with prefill as run:
            rates = measure(sequences, run, args.rounds, on_round=lambda index: _say(f"round {index + 1}"))
    except (DemoModelError, QualityError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except ServerStartError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\nor prefill in this process: --prefill transformers\n")
    rows = rows_of(rates, steps)
    rows += [Row("threads", "restore", 1, "threads"), Row("threads", f"prefill_{args.prefill}", threads, "threads")]
    print(table(rows))
    if args.json is not None:
        write_rows(args.json, rows)


def _say(line: str) -> None:
    print(f"restore: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
