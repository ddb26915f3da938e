"""How fast our codecs encode and decode beside a prefill of the same tokens, with one torch thread and with two.

Blocks decode side by side, as a server restores them, and encode one after another, as it writes
them in the background.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch

from sglang_plt.codec import BLOCK_TOKENS, PoolRows, Rotary, Workers, decode_block, encode_block, make_codec
from sglang_plt.quality.arms import Arm
from sglang_plt.quality.curves import interval
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import Window
from sglang_plt.results import Row

THREADS = (1, 2)
_PREFILL = "prefill"
_FINGERPRINT = 0
_DRAWS = 2000

Rates = dict[tuple[str, str, int], list[float]]
"""(``prefill``, ``encode`` or ``decode``; arm; threads) -> tokens a second, one entry a round."""


def measure_speed(
    model: ReferenceModel,
    windows: Sequence[Window],
    context: int,
    arms: Sequence[Arm],
    repeats: int,
    on_round: Callable[[int], None] = lambda index: None,
    threads: Sequence[int] = THREADS,
) -> Rates:
    """Time a prefill and all ``arms``, codecs of ours, in every round, so that a busy machine slows them alike.

    Args:
        repeats: rounds.
        threads: numbers of torch threads to do it with.
    """
    rotary, before = model.rotary(context), torch.get_num_threads()
    rng = np.random.default_rng(0)
    rates: Rates = defaultdict(list)
    try:
        for index in range(repeats):
            ids = windows[index % len(windows)].ids[:context]
            for number in threads:
                torch.set_num_threads(number)
                started = perf_counter()
                rows = model.prefill(ids)
                rates[_PREFILL, _PREFILL, number].append(context / (perf_counter() - started))
                workers = Workers(number)
                for choice in rng.permutation(len(arms)):
                    arm = arms[choice]
                    encode, decode = _seconds(arm, rows, rotary, workers)
                    rates["encode", arm.name, number].append(context / encode)
                    rates["decode", arm.name, number].append(context / decode)
            on_round(index)
    finally:
        torch.set_num_threads(before)
    return rates


def _seconds(arm: Arm, rows: Rows, rotary: Rotary | None, workers: Workers) -> tuple[float, float]:
    """Encode all rows from scattered slots of a pool, checksums included, and decode them into others."""
    count = len(rows)
    slots = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))
    source, target = slots[:count], slots[count:]

    def buffer(part: torch.Tensor) -> torch.Tensor:
        whole = torch.full((2 * count, *part.shape[1:]), math.nan, dtype=part.dtype)
        whole[source] = part
        return whole

    pool = PoolRows(rows.layout, tuple(map(buffer, rows.keys)), tuple(map(buffer, rows.values)))
    codec = make_codec(arm.name, pool, rotary, arm.profile, arm.embedding)
    codec.warm_up()
    starts = range(0, count, BLOCK_TOKENS)
    parts = [slice(start, start + BLOCK_TOKENS) for start in starts]
    encode_block(codec, _FINGERPRINT, source[parts[0]], 0, tokens=rows.tokens[parts[0]])  # caches
    started = perf_counter()
    blocks = [
        encode_block(codec, _FINGERPRINT, source[part], start, tokens=rows.tokens[part])
        for start, part in zip(starts, parts, strict=True)
    ]
    encoded = perf_counter()
    failed = workers(
        [
            partial(
                decode_block,
                codec,
                _FINGERPRINT,
                block,
                0,
                len(target[part]),
                target[part],
                start,
                tokens=rows.tokens[part],
            )
            for start, part, block in zip(starts, parts, blocks, strict=True)
        ]
    )
    decoded = perf_counter()
    for error in failed:
        if error is not None:
            raise error
    return encoded - started, decoded - encoded


def rows_of_speed(rates: Rates, context: int) -> list[Row]:
    """Medians in tokens a second, and ratios of medians to the prefill's; intervals draw rounds in pairs."""
    rows = []
    for (what, arm, threads), values in sorted(rates.items()):
        ours, theirs = np.array(values), np.array(rates[_PREFILL, _PREFILL, threads])
        draws = np.random.default_rng(0).integers(0, len(ours), (_DRAWS, len(ours)))
        medians, name = np.median(ours[draws], 1), f"{arm}/{context}/all/threads{threads}"
        lo, hi = interval(medians) if len(ours) > 1 else (None, None)
        rows.append(Row(f"{what}_tokens_per_s", name, float(np.median(ours)), "tokens/s", lo, hi, len(ours)))
        if what != _PREFILL:
            lo, hi = interval(medians / np.median(theirs[draws], 1)) if len(ours) > 1 else (None, None)
            ratio = float(np.median(ours) / np.median(theirs))
            rows.append(Row(f"{what}_vs_prefill", name, ratio, "ratio", lo, hi, len(ours)))
    return rows


def speed_table(rows: Sequence[Row]) -> str:
    """One line a codec, context and number of threads."""
    found = {(row.metric, row.arm): row.value for row in rows}
    lines = [f"{'arm':36}{'encode, tokens/s':>18}{'x prefill':>11}{'decode, tokens/s':>18}{'x prefill':>11}"]
    for arm in dict.fromkeys(row.arm for row in rows if row.metric == "decode_vs_prefill"):
        numbers = (
            found[f"{what}_{unit}", arm] for what in ("encode", "decode") for unit in ("tokens_per_s", "vs_prefill")
        )
        encode, encode_ratio, decode, decode_ratio = numbers
        lines.append(f"{arm:36}{encode:>18.0f}{encode_ratio:>11.2f}{decode:>18.0f}{decode_ratio:>11.2f}")
    return "\n".join(lines)
