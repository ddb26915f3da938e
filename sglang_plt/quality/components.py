"""How much of its inverse transform a decoder computes: components that are zero throughout a block are skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from sglang_plt.codec.packing import Packing
from sglang_plt.codec.predictive import Predictive
from sglang_plt.quality.arms import Arm
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import Window

_WINDOWS = 3  # one of each kind of text; their blocks are decoded once more


@dataclass(frozen=True)
class Used:
    """Of one codec with its profile.

    Attributes:
        share: of the multiplications of the inverse transform, in blocks of up to 256 rows; 0 to 1.
        group: layers of a unit of the profile.
        blocks: that were decoded; those stored as ``int8`` have no components and are not among them.
    """

    share: float
    group: int
    blocks: int


class _Counting:
    """A packing that counts what it hands out; its units come in order, again and again."""

    def __init__(self, inner: Packing, widths: list[int]) -> None:
        self._inner, self._widths = inner, widths
        self.calls = self.used = self.total = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dequantise(self, *where: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kept, used = self._inner.dequantise(*where)
        width = self._widths[self.calls % len(self._widths)]
        self.calls += 1
        self.used += int((used < width).sum()) * width  # a band may end in padding
        self.total += width * width
        return kept, used


def used_components(
    name: str,
    profile: Profile,
    prefixes: Iterable[Rows],
    rotary: Rotary | None,
    embedding: TokenEmbedding | None = None,
) -> Used | None:
    """Encode prefixes in blocks as the cache does, decode them, and count.

    Args:
        name: ``fast``, ``dense`` or ``dense-tight``.
        prefixes: rows from position 0 on.

    Returns:
        None where every block was stored as ``int8``.

    Raises:
        EncodeError: the codec cannot represent the rows.
    """
    counts: _Counting | None = None
    for rows in prefixes:
        keys, values = (tuple(buffer.clone() for buffer in kind) for kind in (rows.keys, rows.values))
        codec = make_codec(name, PoolRows(rows.layout, keys, values), rotary, profile, embedding)
        assert isinstance(codec, Predictive)
        if counts is None:
            counts = _Counting(codec.packing, [len(unit.bias) for unit in profile.units])
        codec.packing = cast(Packing, counts)
        slots = torch.arange(len(rows))
        for part in slots.split(BLOCK_TOKENS):
            start = int(part[0])
            tokens = rows.ids(slice(start, start + len(part)))
            block = encode_block(codec, 0, part, start, tokens=tokens)
            decode_block(codec, 0, block, 0, len(part), part, start, tokens=tokens)
    if counts is None or not counts.total:
        return None
    return Used(counts.used / counts.total, profile.info.group, counts.calls // len(profile.units))


def measure_used(
    model: ReferenceModel, windows: Sequence[Window], context: int, arms: Sequence[Arm]
) -> dict[str, Used]:
    """Name of an arm -> what its decoder computes, for those of ``arms`` that have a profile; first windows only."""
    prefixes = [model.prefill(window.ids[:context]) for window in windows[:_WINDOWS]]
    rotary, found = model.rotary(context), {}
    for arm in arms:
        used = None if arm.profile is None else used_components(arm.name, arm.profile, prefixes, rotary, arm.embedding)
        if used is not None:
            found[arm.name] = used
    return found
