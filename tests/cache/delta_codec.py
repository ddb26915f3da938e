"""Blocks that are exact differences from others, over the pool of the harness, and a cache of tiny ones."""

from __future__ import annotations

from typing import Any

import torch

from sglang_plt.blocks import Block
from sglang_plt.cache.near import NearBlocks
from tests.cache.harness import CopyCodec, Harness, Sized

FRAGMENT = 3
"""Tokens of a fragment, and of the shortest stretch, in :func:`with_deltas`."""


class Coded(Sized):
    """Rows less those of ``references``, where there are any."""

    damaged = False
    references: tuple[Coded, ...] = ()
    stretches: tuple[tuple[tuple[int, int, int], ...], ...] = ()


class DeltaCodec(CopyCodec):
    """Integers below 2**24 less such integers are exact in float32, so every row must come back as it was.

    Attributes:
        broken: what its callers did wrong, in words; they count an exception of a codec as a miss, so it raises none.
        num_refused: decodes of damaged blocks or from damaged blocks, and those it was told to refuse.
        num_near: blocks encoded as differences.
        size: what every block takes, where a test wants it to.
    """

    takes_references = True
    takes_tokens = False
    near_share = 8  # a row with a reference takes so much less

    def __init__(self, pool: Any):
        super().__init__(pool)
        self.broken: list[str] = []
        self.num_refused = 0
        self.num_near = 0
        self.size: int | None = None

    def encode(self, slots: torch.Tensor, position: int, teaches: bool = False, references: Any = ()) -> Coded:
        whole = super().encode(slots, position, teaches)
        rows, free = [row.clone() for row in whole], torch.ones(len(slots), dtype=torch.bool)
        for data, stretches in references:
            if not isinstance(data, Coded) or data.references:
                self.broken.append(f"encode was given {data!r} for a reference")
            for there, here, length in stretches:
                if not bool(free[here : here + length].all()) or here + length > len(slots) or length < 1:
                    self.broken.append(f"a stretch {there, here, length} overlaps another or leaves the block")
                free[here : here + length] = False
                for row, other in zip(rows, data, strict=True):
                    row[here : here + length] -= other[there : there + length]
        near = len(slots) - int(free.sum())
        size = max(1, len(whole) * (len(slots) - near + near // self.near_share) // len(slots))
        coded = Coded(rows, self.size or size)
        coded.references = tuple(data for data, _ in references)
        coded.stretches = tuple(tuple(stretches) for _, stretches in references)
        self.num_near += bool(coded.references)
        return coded

    def decode(
        self, data: Coded, start: int, stop: int, slots: torch.Tensor, position: int, references: Any = ()
    ) -> None:
        if "decode" in self.failing or data.damaged or any(reference.damaged for reference in data.references):
            self.num_refused += 1
            raise RuntimeError("decode was told to fail")
        if [id(given) for given in references] != [id(own) for own in data.references]:
            self.broken.append(f"decode was given {references!r}, encoded with {data.references!r}")
        rows = [row.clone() for row in data]
        for reference, stretches in zip(data.references, data.stretches, strict=True):
            for there, here, length in stretches:
                for row, other in zip(rows, reference, strict=True):
                    row[here : here + length] += other[there : there + length]
        super().decode(rows, start, stop, slots, position)


def with_deltas(harness: Harness, *, fixed_size: bool = False) -> DeltaCodec:
    """Let a harness that has served nothing store differences, from runs of :data:`FRAGMENT` tokens on."""
    cold = harness.cache.cold
    codec = cold.codec = harness.codec = DeltaCodec(harness.pool)
    codec.fixed_size = fixed_size
    cold.near = NearBlocks(cold.stats, fragment=FRAGMENT, window=1, min_run=FRAGMENT)
    cold.codec_changed()
    cold.clear()
    return codec


def blocks_of(harness: Harness) -> list[Block]:
    """All blocks that the store holds, oldest first."""
    viewed = {view.block.id: view.block for node in harness.cache.trie.nodes() for view in node.views}
    held = [reference.block for block in viewed.values() for reference in block.references]
    return sorted((viewed | {block.id: block for block in held}).values(), key=lambda block: block.id)
