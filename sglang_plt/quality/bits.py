"""Bits a token: what a text says under the model, what each codec keeps of its KV, and how fast that comes back.

A model's KV is a function of the tokens, so it holds no more information than they do: their surprisal, ``-log2 P`` of
every token after those before it, bounds its bits in the mean (arXiv 2604.15356). What stores no more than that has to
run the model again; a codec stores more, and decodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_plt.codec import EXACT_TOKENS, EncodeError, Profile
from sglang_plt.quality import QualityError
from sglang_plt.quality.arms import codec_arm
from sglang_plt.quality.curves import interval
from sglang_plt.quality.kl import through_codec
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.speed import measure_speed, rows_of_speed
from sglang_plt.quality.texts import Window
from sglang_plt.results import Row
from triton_ops.rotated import NotEncodable

SURPRISAL = "surprisal"
TOKEN_IDS = "token-ids"
_CHUNK = 256  # tokens whose logits are held at once
_DRAWS = 2000
_KIB_BITS = 8 * 1024
_LEGEND = """m  measured on this model; what codecs do to its answers: sglang-plt kl
=  arithmetic; they come back by replay, that is a prefill, whose tokens/s were measured
the bound is surprisal: tokens coded to it are decoded by the model one after another, which was not timed"""


@dataclass(frozen=True)
class Sample:
    """One window.

    Attributes:
        surprisal: bits, mean over the tokens after the first.
        vocabulary: tokens that the model tells apart.
        values: KV numbers of a token.
        bits: codec -> bits of all blocks, headers included, a token.
        coded_bits: codec -> bits a KV number behind the first four tokens, which are kept exact.
    """

    kind: str
    surprisal: float
    vocabulary: int
    values: int
    bits: dict[str, float]
    coded_bits: dict[str, float]


def surprisal(model: ReferenceModel, rows: Rows, ids: Sequence[int]) -> tuple[float, int]:
    """``-log2 P(token | tokens before it)`` in bits, mean over ``ids[1:]``, and the size of the vocabulary.

    Args:
        rows: KV of ``ids``, which start a sequence; at least two.
    """
    total, vocabulary = 0.0, 0
    for start in range(0, len(ids) - 1, _CHUNK):
        following = torch.tensor(ids[start + 1 : start + 1 + _CHUNK])
        logits = model.continue_from(rows.part(slice(0, start)), ids[start : start + len(following)])
        log_p = torch.log_softmax(logits.double(), dim=-1)
        total -= float(log_p.gather(1, following[:, None]).sum())
        vocabulary = logits.shape[1]
    return total / math.log(2) / (len(ids) - 1), vocabulary


def measure(
    model: ReferenceModel,
    windows: Sequence[Window],
    codecs: Sequence[str],
    profiles: Mapping[str, Profile],
    on_window: Callable[[int, Sample], None] = lambda index, sample: None,
) -> list[Sample]:
    """Every codec on every window, in blocks as the cache keeps them.

    Args:
        windows: of more than four tokens.
        profiles: of the codecs that need one, by their names.

    Raises:
        QualityError: a codec cannot represent the model's rows.
    """
    rotary = model.rotary(max(len(window.ids) for window in windows))
    samples = []
    for index, window in enumerate(windows):
        rows, count = model.prefill(window.ids), len(window.ids)
        values, bits, coded = rows.num_values // count, {}, {}
        exact = 8 * EXACT_TOKENS * rows.layout.row_bytes
        for name in codecs:
            try:
                _, num_bytes = through_codec(name, rows, rotary, index, profiles.get(name), 0, model.embedding)
            except (EncodeError, NotEncodable) as error:
                raise QualityError(
                    f"{name} cannot hold rows of this model ({error}): leave it out with --codec"
                ) from error
            bits[name] = 8 * num_bytes / count
            coded[name] = (8 * num_bytes - exact) / (values * (count - EXACT_TOKENS))
        samples.append(Sample(window.kind, *surprisal(model, rows, window.ids), values, bits, coded))
        on_window(index, samples[-1])
    return samples


def measure_times(
    model: ReferenceModel,
    windows: Sequence[Window],
    context: int,
    codecs: Sequence[str],
    profiles: Mapping[str, Profile],
    repeats: int,
) -> list[Row]:
    """Tokens a second of a prefill and of every decoder on one torch thread; arms ``prefill/all`` and ``codec/all``."""
    arms = [codec_arm(name, profiles.get(name)) for name in codecs]
    rates = measure_speed(model, windows, context, arms, repeats, threads=(1,))
    kept = ("prefill_tokens_per_s", "decode_tokens_per_s", "decode_vs_prefill")
    rows = [row for row in rows_of_speed(rates, context) if row.metric in kept]
    return [replace(row, arm=f"{row.arm.partition('/')[0]}/all") for row in rows]


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Means over windows and 95 % bootstrap intervals; arms are ``codec/all``, and ``codec/kind`` where kinds differ.

    ``bits_per_token`` of ``token-ids`` is the logarithm of the vocabulary, of ``token-ids-int16`` (``-int32`` beyond
    65,536 tokens) the width of a number: no measurements. ``coded_bits_per_value`` leaves the first four tokens out.
    """
    kinds: dict[str, list[Sample]] = defaultdict(list, all=list(samples))
    if len({sample.kind for sample in samples}) > 1:
        for sample in samples:
            kinds[sample.kind].append(sample)
    rows = [
        _mean("surprisal_bits_per_token", f"{SURPRISAL}/{kind}", [sample.surprisal for sample in found])
        for kind, found in kinds.items()
    ]
    vocabulary, values = samples[0].vocabulary, samples[0].values
    whole = 16 if vocabulary <= 1 << 16 else 32
    rows.append(Row("bits_per_token", f"{TOKEN_IDS}/all", math.log2(vocabulary), "bits"))
    rows.append(Row("bits_per_token", f"{TOKEN_IDS}-int{whole}/all", whole, "bits"))
    for codec in samples[0].bits:
        for kind, found in kinds.items():
            arm, bits = f"{codec}/{kind}", np.array([sample.bits[codec] for sample in found])
            rows.append(_mean("bits_per_token", arm, bits))
            rows.append(_mean("bits_per_value", arm, bits / values))
            rows.append(_mean("coded_bits_per_value", arm, [sample.coded_bits[codec] for sample in found]))
    return rows


def _mean(metric: str, arm: str, numbers: Sequence[float] | np.ndarray) -> Row:
    values = np.array(numbers)
    if len(values) == 1:
        return Row(metric, arm, float(values[0]), "bits")
    draws = np.random.default_rng(0).integers(0, len(values), (_DRAWS, len(values)))
    return Row(metric, arm, float(values.mean()), "bits", *interval(values[draws].mean(1)), len(values))


def table(rows: Sequence[Row]) -> str:
    """What this model needs, one line an arm and kind of text, marked ``m`` for measured and ``=`` for arithmetic."""
    found = {(row.metric, row.arm): row for row in rows}
    prefill = found.get(("prefill_tokens_per_s", "prefill/all"))
    lines = [
        f"{'  stored/text':22}{'bits a token [95 %]':>32}{'bits a value':>14}{'KiB a token':>13}"
        f"{'tokens/s back':>15}{'x prefill':>11}"
    ]
    bits = {row.arm: row for row in rows if row.metric in ("surprisal_bits_per_token", "bits_per_token")}
    for arm, row in bits.items():
        ids = arm.startswith(TOKEN_IDS)
        value, ratio = found.get(("bits_per_value", arm)), found.get(("decode_vs_prefill", arm))
        rate = prefill if ids else found.get(("decode_tokens_per_s", arm))
        ends = "" if row.lo is None or row.lo == row.hi else f" [{_short(row.lo)}, {_short(row.hi or row.lo)}]"
        size = row.value / _KIB_BITS
        cells = (
            (f"{_short(row.value)}{ends}", 32),
            (f"{value.value:.3f}" if value else "-", 14),
            (f"{size:.3f}" if size >= 0.1 else f"{size:.5f}", 13),
            (f"{rate.value:.0f}" if rate else "-", 15),
            (f"{ratio.value:.2f}" if ratio else "1 (replay)" if ids and rate else "-", 11),
        )
        lines.append(f"{'=' if ids else 'm'} {arm:20}" + "".join(f"{text:>{width}}" for text, width in cells))
    return "\n".join((*lines, _LEGEND))


def _short(bits: float) -> str:
    return f"{bits:.2f}" if bits < 100 else f"{bits:,.0f}"
