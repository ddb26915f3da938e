"""What the cache costs when it does not help: ``match_prefix``, ``checkpoint`` and ``evict`` beside SGLang's own trees.

One process, one sequence of operations, one kind of pool: every operation runs on all arms in turn before the next one
starts, so that a busy machine slows all of them alike. Every arm must give the same lengths, or no number is reported.

    python -m bench_serving.overhead [--json FILE] [--tokens 32768] [--nodes 10000] [--page-size 1] [--rounds 250]

A tree has trunks of ``--tokens`` tokens, cut by branches into nodes of 512 tokens; half of its nodes are leaves of 128
tokens. The trunks are in use and stay; what else goes is up to the policy: ``value``, the default, or ``lru``. A round
matches a whole trunk, a key that leaves a trunk inside a node, and a key that the tree has never seen; it checkpoints a
request that extends a trunk by 256 tokens, finishes it 64 tokens later, and evicts 256 tokens twice.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from bench_serving.overhead_arms import BRANCH, EDGE, EVICT, EXTEND, OURS, OUTPUT, THEIRS, Arm, FakeReq, Shape
from sglang_plt.results import Row, write_rows

WORKLOADS = ("match/full_hit", "match/mid_node", "match/miss", "checkpoint/extend", "checkpoint/finish", "evict/256")


@dataclass
class Run:
    """Microseconds and the lengths that the operations returned: ``[arm][workload]``, one entry an operation.

    ``learning[arm]`` are the microseconds that a round spends on learning from its request.
    """

    micros: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    lengths: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    learning: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def build(shape: Shape, arms: list[Arm], rng: np.random.Generator) -> tuple[list[array], Iterator[int]]:
    """Fill the trees; returns the trunks and a source of first tokens that no key has used."""
    fresh = iter(range(1 << 20, 1 << 40))
    trunks = [_tokens(rng, next(fresh), shape.tokens) for _ in range(shape.trunks)]
    cuts = [(trunk, cut * EDGE) for trunk in trunks for cut in range(1, shape.edges)]
    rng.shuffle(cuts)
    branches = [(trunk[:cut] + _tokens(rng, next(fresh), BRANCH), cut) for trunk, cut in cuts]
    for arm in arms:
        for trunk in trunks:
            arm.insert(trunk, 0)
        for key, cut in branches:
            arm.insert(key, cut)
        for trunk in trunks:
            arm.hold(trunk)
    for key, _ in branches:
        output_len = int(rng.integers(1, 2048))
        for arm in arms:
            arm.remember(key, output_len)
    return trunks, fresh


def _tokens(rng: np.random.Generator, first: int, length: int) -> array:
    """Random token ids behind ``first``."""
    return array("q", [first]) + array("q", rng.integers(0, 1 << 17, length - 1, dtype=np.int64).tobytes())


def run(shape: Shape) -> Run:
    """Build the trees and run the rounds.

    Raises:
        RuntimeError: two arms gave different lengths for the same operation.
    """
    rng = np.random.default_rng(shape.seed)
    arms = [Arm(name, shape) for name in (*OURS, *THEIRS)]
    trunks, fresh = build(shape, arms, rng)
    result = Run()

    def timed(workload: str, operations: list[Callable[[], int]]) -> None:
        for index in rng.permutation(len(arms)):  # no arm always runs on the caches that another one left
            started = time.perf_counter_ns()
            length = operations[index]()
            elapsed = time.perf_counter_ns() - started
            result.micros[arms[index].name][workload].append(elapsed / 1000)
            result.lengths[arms[index].name][workload].append(length)
            arms[index].settle()

    def match(workload: str, key: array) -> None:
        def operation(arm: Arm) -> Callable[[], int]:
            params = MatchPrefixParams(RadixKey(key), req=FakeReq(key, key))
            return lambda: arm.cache.match_prefix(params).device_prefix_len

        timed(workload, [operation(arm) for arm in arms])

    def round_() -> None:
        trunk = trunks[rng.integers(len(trunks))]
        match("match/full_hit", trunk)
        # multiples of 64 are legal page boundaries; the node is whole unless an earlier round met the same edge
        leave = shape.tokens // 2 + 64 * int(rng.integers(1, shape.tokens // 128))
        leave += 64 if leave % EDGE == 0 else 0
        match("match/mid_node", trunk[:leave] + _tokens(rng, next(fresh), shape.tokens - leave))
        match("match/miss", _tokens(rng, next(fresh), shape.tokens))

        trunk, tail = trunks[rng.integers(len(trunks))], _tokens(rng, next(fresh), EXTEND)
        reqs = [arm.start(trunk, tail) for arm in arms]
        timed("checkpoint/extend", [partial(arm.checkpoint, req) for arm, req in zip(arms, reqs, strict=True)])
        answer = _tokens(rng, next(fresh), OUTPUT)
        for arm, req in zip(arms, reqs, strict=True):
            req.full_untruncated_fill_ids, req.is_finished = req.origin_input_ids + answer, True
            arm.grow(req, len(req.origin_input_ids))
        timed("checkpoint/finish", [partial(arm.finish, req) for arm, req in zip(arms, reqs, strict=True)])
        for arm, req in zip(arms, reqs, strict=True):
            result.learning[arm.name].append(arm.learning_us)
            arm.learning_us = 0.0
            arm.pool.free(req)

        for _ in range(2):
            timed("evict/256", [arm.evict for arm in arms])
        cut = EDGE * int(rng.integers(1, shape.edges))
        key = trunk[:cut] + _tokens(rng, next(fresh), 2 * EVICT - EXTEND - OUTPUT)
        for arm in arms:
            arm.insert(key, cut)

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for count in range(shape.warmup + shape.rounds):
            if count == shape.warmup:
                result = Run()
            round_()
            if count % 16 == 0:
                gc.collect(0)
    finally:
        gc.enable()
        gc.unfreeze()
        for arm in arms:
            if arm.name in OURS:
                arm.cache.release_host_resources()
    first = result.lengths[arms[0].name]
    for arm in arms[1:]:
        for workload in WORKLOADS:
            found, wanted = result.lengths[arm.name][workload], first[workload]
            # policies take other nodes
            if found != wanted and (workload != "evict/256" or min(found) < EVICT):
                raise RuntimeError(f"{arm.name} and {arms[0].name} disagree on the lengths of {workload}")
    return result


def rows_of(result: Run, seed: int = 0) -> list[Row]:
    """Ratios of medians with a paired bootstrap interval of 95 %, then the microseconds.

    A row without a workload is the worst workload of its operation. ``lru_`` marks our cache with that policy,
    ``cold_tier_`` the default policy with a cold tier. ``policy_per_evicted_token`` is what learning from requests,
    choosing and taking victims costs.
    """
    rng = np.random.default_rng(seed)
    micros = {arm: {name: np.array(values) for name, values in work.items()} for arm, work in result.micros.items()}
    draws = {name: rng.integers(0, n, (1000, n)) for name in WORKLOADS for n in [len(micros["plt"][name])]}
    rows: list[Row] = []
    for ours, prefix in OURS.items():
        for theirs, label in THEIRS.items():
            ratios: dict[str, list[Row]] = defaultdict(list)
            for workload in WORKLOADS:
                a, b, draw = micros[ours][workload], micros[theirs][workload], draws[workload]
                lo, hi = _interval(np.median(a[draw], axis=1) / np.median(b[draw], axis=1))
                operation, _, name = workload.partition("/")
                value = float(np.median(a) / np.median(b))
                ratios[operation].append(
                    Row(f"{operation}_p50_ratio", f"{prefix}{label}/{name}", value, "ratio", lo, hi, len(a))
                )
            for found in ratios.values():
                rows.append(replace(max(found, key=lambda row: row.value), arm=prefix + label))
                rows += found
    for arm, work in micros.items():
        for workload in WORKLOADS:
            operation, _, name = workload.partition("/")
            sample, draw = work[workload], draws[workload]
            for quantile in (50, 99):
                lo, hi = _interval(np.percentile(sample[draw], quantile, axis=1))
                value = float(np.percentile(sample, quantile))
                rows.append(Row(f"{operation}_p{quantile}", f"{arm}/{name}", value, "us", lo, hi, len(sample)))
    for arm in OURS:
        n = len(result.learning[arm])
        cost = np.array(result.learning[arm]) + micros[arm]["evict/256"].reshape(n, -1).sum(1)
        tokens = np.array(result.lengths[arm]["evict/256"]).reshape(n, -1).sum(1)
        draw = rng.integers(0, n, (1000, n))
        lo, hi = _interval(cost[draw].sum(1) / tokens[draw].sum(1))
        rows.append(Row("policy_per_evicted_token", arm, float(cost.sum() / tokens.sum()), "us", lo, hi, n))
    return rows


def _interval(estimates: np.ndarray) -> tuple[float, float]:
    return float(np.percentile(estimates, 2.5)), float(np.percentile(estimates, 97.5))


def table(rows: list[Row]) -> str:
    """Microseconds per arm and workload, and the ratios of the summary rows."""
    found = {(row.metric, row.arm): row for row in rows}
    arms = (*OURS, *THEIRS)
    lines = ["microseconds, p50 (p99)".ljust(26) + "".join(arm.rjust(20) for arm in arms)]
    for workload in WORKLOADS:
        operation, _, name = workload.partition("/")
        cells = [[found[f"{operation}_p{q}", f"{arm}/{name}"].value for q in (50, 99)] for arm in arms]
        lines.append(workload.ljust(26) + "".join(f"{p50:.0f} ({p99:.0f})".rjust(20) for p50, p99 in cells))
    lines += ["", "ratio of p50, ours over theirs [95 % interval]"]
    for row in rows:
        if row.unit == "ratio":
            interval = f"[{row.lo:.3f}, {row.hi:.3f}]"
            lines.append(f"{row.metric:24}{row.arm:36}{row.value:8.3f}  {interval}")
    lines += ["", "microseconds of the policy per evicted token [95 % interval]"]
    for arm in OURS:
        row = found["policy_per_evicted_token", arm]
        lines.append(f"{arm:24}{row.value:8.3f}  [{row.lo:.3f}, {row.hi:.3f}]")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench_serving.overhead")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    for name in ("tokens", "nodes", "page_size", "rounds"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(Shape, name))
    options = vars(parser.parse_args(argv))
    path = options.pop("json")
    shape = Shape(**options)
    torch.set_num_threads(1)
    print(f"{shape.trunks} trunks of {shape.tokens} tokens, page size {shape.page_size}", file=sys.stderr, flush=True)
    rows = rows_of(run(shape))
    print(table(rows))
    if path is not None:
        write_rows(path, rows)


if __name__ == "__main__":
    main()
