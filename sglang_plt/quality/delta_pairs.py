"""What the second prompt of a pair takes as differences from the first, and what that does to the model's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_plt.codec import (
    BLOCK_TOKENS,
    PoolRows,
    Profile,
    Reference,
    Rotary,
    Stretch,
    decode_block,
    delta,
    encode_block,
)
from sglang_plt.codec.base import exact_rows
from sglang_plt.codec.block import HEADER_BYTES
from sglang_plt.codec.coded import HEAD, TOKENS, Mode
from sglang_plt.codec.predictive import Predictive
from sglang_plt.codec.reference import Sources
from sglang_plt.quality import QualityError
from sglang_plt.quality.kl import divergence
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.pairs import PROMPT, Pair
from sglang_plt.results import Row
from sglang_plt.similar import Run, align

MIN_RUN = 16
"""Shorter runs of equal tokens are no counterparts."""
_FINGERPRINT = 0


@dataclass(frozen=True)
class Sample:
    """One codec on one pair.

    Attributes:
        tail: rows of the second prompt from its first difference on; what lies before is shared, and not coded.
        near: those of them that have a counterpart in the first prompt.
        bits: a value of those, with all that their blocks hold but the codes of rows without a counterpart.
        apart: bits a value of rows without a counterpart; None where all have one.
        bits_alone: a value of the tail without the first prompt.
        kl, kl_alone: nats, mean over the tokens of the continuation, when the tail was restored from either.
        top1, top1_alone: share of them whose most probable next token stays the same.
    """

    codec: str
    pair: str
    tail: int
    near: int
    bits: float
    apart: float | None
    bits_alone: float
    kl: float
    kl_alone: float
    top1: float
    top1_alone: float


class _Case:
    """The exact rows of both prompts of a pair in one pool, and room for what comes back of the second."""

    def __init__(self, model: ReferenceModel, pair: Pair) -> None:
        prompt = pair.target[:PROMPT]
        first, second = model.prefill(pair.reference), model.prefill(prompt)
        self.begin = next(
            at for at, (one, other) in enumerate(zip(pair.reference, prompt, strict=False)) if one != other
        )
        self.runs = align(np.array(pair.reference), np.array(prompt), MIN_RUN)
        self.near: np.ndarray = np.zeros(len(prompt), bool)
        for run in self.runs:
            self.near[run.target : run.target + run.length] = True
        self.near[: self.begin] = False
        slots = torch.randperm(len(first) + 2 * len(second), generator=torch.Generator().manual_seed(0))
        self._first, self._second, self._back = slots.split((len(first), len(second), len(second)))
        self.pool = PoolRows(
            first.layout,
            tuple(map(self._scatter, first.keys, second.keys)),
            tuple(map(self._scatter, first.values, second.values)),
        )
        self.embedding, self._first_tokens = model.embedding, first.tokens
        self._exact, self._model, self._continuation = second, model, pair.target[PROMPT:]
        self._cold = model.continue_from(second, self._continuation)

    def _scatter(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """A pool buffer; what nobody wrote is NaN and would be seen."""
        buffer = torch.full((len(first) + 2 * len(second), *first.shape[1:]), math.nan, dtype=first.dtype)
        buffer[self._first], buffer[self._second] = first, second
        return buffer

    def references(self, codec: Predictive) -> list[np.ndarray]:
        """The blocks of the first prompt."""
        return [
            encode_block(
                codec,
                _FINGERPRINT,
                self._first[start : start + BLOCK_TOKENS],
                start,
                tokens=self._first_tokens[start : start + BLOCK_TOKENS],
            )
            for start in range(0, len(self._first), BLOCK_TOKENS)
        ]

    def through(self, codec: Predictive, references: Sequence[np.ndarray]) -> tuple[float, float, float, float]:
        """Encode and restore the tail.

        Returns:
            Bytes of rows with a counterpart, bytes of the others, and divergence and agreement behind the tail.
        """
        near_bytes = apart_bytes = 0.0
        for start in range(self.begin, len(self._second), BLOCK_TOKENS):
            rows = slice(start, start + BLOCK_TOKENS)
            slots = self._second[rows]
            given = _facing(references, self.runs, start, start + len(slots))
            tokens = self._exact.tokens[rows]
            block = encode_block(codec, _FINGERPRINT, slots, start, given, tokens)
            named = [reference.block for reference in given]
            decode_block(codec, _FINGERPRINT, block, 0, len(slots), self._back[rows], start, named, tokens)
            apart = _bytes_apart(codec, block, self.near[rows], start)
            near_bytes, apart_bytes = near_bytes + len(block) - apart, apart_bytes + apart
        restored = self._second.clone()
        restored[self.begin :] = self._back[self.begin :]
        keys, values = (tuple(buffer[restored] for buffer in kind) for kind in (self.pool.keys, self.pool.values))
        kl, top1 = divergence(self._cold, self._model.continue_from(Rows(keys, values), self._continuation))
        return near_bytes, apart_bytes, kl, top1


def _facing(blocks: Sequence[np.ndarray], runs: Iterable[Run], start: int, stop: int) -> list[Reference]:
    """The blocks of the first prompt that rows ``start .. stop`` of the second have counterparts in."""
    found = []
    for number, block in enumerate(blocks):
        first, stretches = number * BLOCK_TOKENS, []
        for run in runs:
            shift = run.target - run.reference
            low = max(run.target, start, first + shift)
            high = min(run.target + run.length, stop, first + BLOCK_TOKENS + shift)
            if low < high:
                stretches.append(Stretch(low - shift - first, low - start, high - low))
        if stretches:
            found.append(Reference(block, tuple(stretches)))
    return found


def _bytes_apart(codec: Predictive, block: np.ndarray, near: np.ndarray, position: int) -> float:
    """Bytes of a block that rows without a counterpart take: their share of those that are coded without reference."""
    alone = np.count_nonzero(~near)
    payload, num_exact = block[HEADER_BYTES:], exact_rows(position, len(near))
    mode, num_escaped, _ = HEAD.unpack_from(payload.data)
    if mode & ~TOKENS != Mode.DIFFERENCES:
        return len(block) * alone / len(near)
    info = codec.profile.info
    at = HEAD.size + num_exact * codec.layout.row_bytes + num_escaped * (1 + 4 * info.width * info.num_layers)
    at += 8 * bool(mode & TOKENS)
    coded = len(near) - num_exact
    sources, used = Sources.unpack(payload[at:].data, coded)
    at += used
    _, used = delta.unpack(payload[at:].data, [len(unit) * info.width for unit in info.units], len(sources.rows))
    own = coded - len(sources.rows)
    return (len(payload) - at - used) * alone / own if own else 0.0


def measure(
    model: ReferenceModel,
    pairs: Sequence[Pair],
    profiles: Mapping[str, Profile],
    reference_step: float = 1.0,
    step: float = 1.0,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Every pair through the codecs of ``profiles``, in blocks as the cache makes them.

    Args:
        reference_step, step: of the quantiser of the first and the second prompt, in steps of the profile.

    Raises:
        QualityError: the model's rotary is not understood.
    """
    rotary = model.rotary(max(len(tokens) for pair in pairs for tokens in (pair.reference, pair.target)))
    if rotary is None:
        raise QualityError("the model's rotary is not understood: keys cannot be compared at other positions")
    samples = []
    for pair in pairs:
        case = _Case(model, pair)
        for profile in profiles.values():
            samples.append(_sample(case, pair, rotary, profile, reference_step, step))
            on_sample(samples[-1])
    return samples


def _sample(case: _Case, pair: Pair, rotary: Rotary, profile: Profile, reference_step: float, step: float) -> Sample:
    codec = Predictive(case.pool, rotary, profile, step * profile.info.scale, case.embedding)
    fine = Predictive(case.pool, rotary, profile, reference_step * profile.info.scale, case.embedding)
    near_bytes, apart_bytes, kl, top1 = case.through(codec, case.references(fine))
    *alone, kl_alone, top1_alone = case.through(codec, [])
    tail, near = len(case.near) - case.begin, int(np.count_nonzero(case.near))
    row = profile.info.width * profile.info.num_layers / 8
    return Sample(
        codec=codec.name,
        pair=pair.name,
        tail=tail,
        near=near,
        bits=near_bytes / (near * row),
        apart=apart_bytes / ((tail - near) * row) if tail > near else None,
        bits_alone=sum(alone) / (tail * row),
        kl=kl,
        kl_alone=kl_alone,
        top1=top1,
        top1_alone=top1_alone,
    )


def rows_of(samples: Iterable[Sample]) -> list[Row]:
    """An arm a pair: its name for ``dense``, ``codec/name`` for others."""
    rows = []
    for sample in samples:
        arm = sample.pair if sample.codec == "dense" else f"{sample.codec}/{sample.pair}"
        found = [
            ("bits_per_value", sample.bits, "bits", sample.near),
            ("bits_per_value_alone", sample.bits_alone, "bits", sample.tail),
            ("kl", sample.kl, "nats", 1),
            ("kl_alone", sample.kl_alone, "nats", 1),
            ("top1_agreement", sample.top1, "1", 1),
            ("top1_agreement_alone", sample.top1_alone, "1", 1),
        ]
        if sample.apart is not None:
            found.append(("bits_per_value_without_counterpart", sample.apart, "bits", sample.tail - sample.near))
        rows += [Row(metric, arm, value, unit, n=n) for metric, value, unit, n in found]
    return rows


def table(samples: Iterable[Sample]) -> str:
    """One line a pair and codec."""
    lines = [
        f"{'codec':7}{'pair':21}{'tail':>5}{'apart':>7}{'bits/value':>12}{'alone':>8}{'apart':>8}"
        f"{'KL':>10}{'alone':>10}{'top-1':>8}{'alone':>8}"
    ]
    for sample in samples:
        apart = "-" if sample.apart is None else f"{sample.apart:.3f}"
        lines.append(
            f"{sample.codec:7}{sample.pair:21}{sample.tail:>5}{sample.tail - sample.near:>7}{sample.bits:>12.4f}"
            f"{sample.bits_alone:>8.3f}{apart:>8}{sample.kl:>10.5f}{sample.kl_alone:>10.5f}"
            f"{100 * sample.top1:>7.1f}%{100 * sample.top1_alone:>7.1f}%"
        )
    return "\n".join(lines)
