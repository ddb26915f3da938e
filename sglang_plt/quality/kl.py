"""KL divergence of the next-token distributions behind restored KV from those behind exact KV."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from sglang_plt.codec import (
    BLOCK_TOKENS,
    PoolRows,
    Profile,
    Rotary,
    TokenEmbedding,
    decode_block,
    encode_block,
    make_codec,
)
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import Window
from sglang_plt.results import Row

_FINGERPRINT = 0
_DRAWS = 2000
_CHUNK = 32  # tokens whose distributions are held in float64 at once


@dataclass(frozen=True)
class Sample:
    """One codec on one window.

    Attributes:
        kl: nats, mean over the tokens of the continuation.
        top1: share of them whose most probable next token stays the same.
        bits: of all blocks of the prefix, headers included, a KV number.
    """

    codec: str
    kind: str
    kl: float
    top1: float
    bits: float


def through_codec(
    name: str,
    rows: Rows,
    rotary: Rotary | None,
    seed: int = 0,
    profile: Profile | None = None,
    position: int = 0,
    embedding: TokenEmbedding | None = None,
) -> tuple[Rows, int]:
    """Encode and decode rows as the cache does, in blocks of 256 rows between scattered slots of a pool.

    Args:
        position: of the first row.
        embedding: of the model, for a profile that predicts from tokens.

    Returns:
        The restored rows, and the bytes of all blocks.
    """
    num_rows = len(rows)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(2 * num_rows, generator=generator)
    source, target = slots[:num_rows], slots[num_rows:]
    pool = PoolRows(
        rows.layout,
        tuple(_scatter(key, source) for key in rows.keys),
        tuple(_scatter(value, source) for value in rows.values),
    )
    codec = make_codec(name, pool, rotary, profile, embedding)
    num_bytes = 0
    for start in range(0, num_rows, BLOCK_TOKENS):
        part = slice(start, start + BLOCK_TOKENS)
        tokens = rows.ids(part)
        block = encode_block(codec, _FINGERPRINT, source[part], position + start, tokens=tokens)
        decode_block(codec, _FINGERPRINT, block, 0, len(target[part]), target[part], position + start, tokens=tokens)
        num_bytes += len(block)
    keys, values = (tuple(buffer[target] for buffer in kind) for kind in (pool.keys, pool.values))
    restored = Rows(keys, values, rows.tokens)
    return restored, num_bytes


def through_turns(
    model: ReferenceModel, ids: Sequence[int], turns: int, name: str, rotary: Rotary | None, profile: Profile | None
) -> tuple[Rows, int]:
    """A prefix that grew in ``turns`` equal turns, each computed behind the restored rows of those before it.

    Returns:
        The rows as the last turn leaves them, all demoted and restored, and the bytes of all blocks.
    """
    rows: Rows | None = None
    total = 0
    for turn in range(turns):
        begin, end = (len(ids) * number // turns for number in (turn, turn + 1))
        new = model.prefill(ids[:end]) if rows is None else model.extend(rows, ids[begin:end])
        restored, num_bytes = through_codec(name, new, rotary, turn, profile, begin, model.embedding)
        rows, total = (restored if rows is None else rows.followed_by(restored)), total + num_bytes
    assert rows is not None
    return rows, total


def _scatter(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A pool buffer of twice the rows; what nobody wrote is NaN and would be seen."""
    buffer = torch.full((2 * len(rows), *rows.shape[1:]), math.nan, dtype=rows.dtype)
    buffer[slots] = rows
    return buffer


def divergence(cold: torch.Tensor, warm: torch.Tensor) -> tuple[float, float]:
    """``(KL(cold || warm), top-1 agreement)`` of logits ``[tokens, vocabulary]``, means over tokens, in float64."""
    total = 0.0
    for start in range(0, len(cold), _CHUNK):
        log_p = torch.log_softmax(cold[start : start + _CHUNK].double(), dim=-1)
        log_q = torch.log_softmax(warm[start : start + _CHUNK].double(), dim=-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    same = (cold.argmax(-1) == warm.argmax(-1)).double().mean()
    return total / len(cold), float(same)


def measure(
    model: ReferenceModel,
    windows: Sequence[Window],
    context: int,
    codecs: Sequence[str],
    on_window: Callable[[int, list[Sample]], None] = lambda index, samples: None,
    profiles: Mapping[str, Profile] = MappingProxyType({}),
    turns: int = 1,
) -> list[Sample]:
    """Run every codec on every window, whose first ``context`` tokens are the prefix.

    Args:
        turns: in how many turns the prefix grows, each restored before the next.
        on_window: called after each window with its index and its samples.
        profiles: of the codecs that need one, by their names.
    """
    rotary = model.rotary(context)
    samples = []
    for index, window in enumerate(windows):
        exact = model.prefill(window.ids[:context])
        tail = window.ids[context:]
        cold = model.continue_from(exact, tail)
        found = []
        for name in codecs:
            profile = profiles.get(name)
            if turns > 1:
                restored, num_bytes = through_turns(model, window.ids[:context], turns, name, rotary, profile)
            else:
                restored, num_bytes = through_codec(name, exact, rotary, index, profile, 0, model.embedding)
            kl, top1 = divergence(cold, model.continue_from(restored, tail))
            found.append(Sample(name, window.kind, kl, top1, 8 * num_bytes / exact.num_values))
        samples += found
        on_window(index, found)
    return samples


def rows_of(samples: Iterable[Sample]) -> list[Row]:
    """Means with a bootstrap interval of 95 % over windows; arms are codecs, and ``codec/kind`` where kinds differ."""
    arms: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        arms[sample.codec].append(sample)
    for codec, of_codec in list(arms.items()):
        if len({sample.kind for sample in of_codec}) > 1:
            for sample in of_codec:
                arms[f"{codec}/{sample.kind}"].append(sample)
    rows = []
    for arm, of_arm in arms.items():
        for metric, name, unit in (
            ("kl_warm_cold", "kl", "nats"),
            ("top1_agreement", "top1", "1"),
            ("bits_per_value", "bits", "bits"),
        ):
            values = np.array([getattr(sample, name) for sample in of_arm])
            lo, hi = _interval(values) if len(values) > 1 else (None, None)
            rows.append(Row(metric, arm, float(values.mean()), unit, lo, hi, len(values)))
    return rows


def _interval(values: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(0, len(values), (_DRAWS, len(values)))
    means = values[draws].mean(axis=1)
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def table(rows: Sequence[Row]) -> str:
    """One line a codec and kind of text."""
    found = {(row.metric, row.arm): row for row in rows}
    lines = [f"{'codec':14}{'KL warm|cold, nats [95 %]':36}{'top-1 same':>11}{'bits/value':>12}{'windows':>9}"]
    for arm in dict.fromkeys(row.arm for row in rows):
        kl, top1, bits = (found[metric, arm] for metric in ("kl_warm_cold", "top1_agreement", "bits_per_value"))
        interval = f" [{kl.lo:.6f}, {kl.hi:.6f}]" if kl.lo is not None else ""
        line = f"{arm:14}{f'{kl.value:.6f}{interval}':36}{100 * top1.value:>10.2f}%{bits.value:>12.3f}{kl.n:>9}"
        lines.append(line)
    return "\n".join(lines)
