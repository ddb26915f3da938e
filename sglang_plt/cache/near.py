"""Finds stored blocks whose tokens are nearly those of a block about to be stored.

Blocks are compared, not prompts: whatever lies before and behind, a block's rows can be coded as differences from rows
of the same tokens elsewhere, at any position. What shares a long prefix in the trie shares these rows already; what
follows a first difference is found by its fragments. Only blocks without references are offered, so a difference is
always one step from rows that stand for themselves.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable

import numpy as np

from sglang_plt.blocks import Block, BlockReference
from sglang_plt.cache.stats import CacheStats
from sglang_plt.node import Node
from sglang_plt.similar import FragmentIndex, align

MAX_REFERENCES = 4
"""Of one block; a stretch of 256 tokens that shifted meets two blocks."""
_TRIED = 8  # candidates that are aligned
_MIN_SHARE = 4  # a block refers to others where a fourth of its rows do, and at least two runs' worth
_ALIKE = 8  # candidates within an eighth of the best are judged by how probable they are

Pieces = tuple[tuple[int, int, int], ...]
"""``(row of the reference, row, rows)``, as of :class:`BlockReference`."""


class NearBlocks:
    """Of one cache; every rank finds the same, from tokens and counts alone.

    Args:
        fragment, window: as of :class:`sglang_plt.similar.FragmentIndex`.
        min_run: tokens of the shortest stretch; rows right behind a difference resemble their counterparts least.
    """

    def __init__(self, stats: CacheStats, fragment: int = 16, window: int = 16, min_run: int = 16):
        self._stats = stats
        self._min_run = min_run
        self._index = FragmentIndex(fragment, window)
        self._members: dict[int, tuple[Block, Node]] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_bytes(self) -> int:
        """Host memory of the index."""
        return self._index.num_bytes

    def find(self, namespace: Hashable, tokens: array) -> tuple[BlockReference, ...]:
        """What the rows of ``tokens`` may be coded as differences from; nothing of another namespace."""
        started = time.perf_counter()
        rows = np.frombuffer(tokens, np.int64)
        aligned: list[tuple[int, Pieces]] = []
        for candidate in self._index.find(namespace, rows, _TRIED):
            runs = align(self._index.tokens(candidate.item), rows, self._min_run)
            aligned.append((candidate.item, tuple((run.reference, run.target, run.length) for run in runs)))
        self._stats.near_candidates += len(aligned)
        found = self._cover(aligned, len(rows))
        self._stats.near_accepted += len(found)
        self._stats.observe("align", time.perf_counter() - started)
        return found

    def add(self, block: Block, node: Node, tokens: array) -> None:
        """Offer ``block``, the rows of ``tokens`` of ``node``, to those that come."""
        if not block.references:
            self._index.add(block.id, node.key.namespace, np.frombuffer(tokens, np.int64))
            self._members[block.id] = block, node

    def forget(self, block: Block) -> None:
        """Offer ``block`` no more."""
        if self._members.pop(block.id, None) is not None:
            self._index.remove(block.id)

    def clear(self) -> None:
        self._index.clear()
        self._members.clear()

    def _cover(self, aligned: list[tuple[int, Pieces]], num_rows: int) -> tuple[BlockReference, ...]:
        free: np.ndarray = np.ones(num_rows, bool)
        chosen: list[BlockReference] = []
        while len(chosen) < MAX_REFERENCES:
            offers = []
            for item, runs in aligned:
                pieces = tuple(piece for run in runs for piece in _free_parts(run, free, self._min_run))
                if pieces:
                    offers.append((sum(length for _, _, length in pieces), item, pieces))
            if not offers:
                break
            item, pieces = self._best(offers)
            chosen.append(BlockReference(self._members[item][0], pieces))
            for _, row, length in pieces:
                free[row : row + length] = False
        covered = num_rows - int(np.count_nonzero(free))
        return tuple(chosen) if covered >= max(2 * self._min_run, num_rows // _MIN_SHARE) else ()

    def _best(self, offers: list[tuple[int, int, Pieces]]) -> tuple[int, Pieces]:
        """The offer that covers most; of those nearly as good the one in use, until another is twice as probable."""
        most = max(covered for covered, _, _ in offers)
        good = {item: pieces for covered, item, pieces in offers if covered * _ALIKE >= most * (_ALIKE - 1)}

        def weight(item: int) -> int:
            return self._members[item][1].weight

        incumbent = min(good, key=lambda item: (-self._members[item][0].dependants, item))
        challenger = min(good, key=lambda item: (-weight(item), item))
        item = challenger if weight(challenger) > 2 * weight(incumbent) else incumbent
        return item, good[item]


def _free_parts(run: tuple[int, int, int], free: np.ndarray, min_run: int) -> list[tuple[int, int, int]]:
    """The parts of ``(row of the reference, row, length)`` whose rows are all free, short ones left out."""
    reference, row, length = run
    edges = np.flatnonzero(np.diff(free[row : row + length].astype(np.int8), prepend=0, append=0))
    return [
        (reference + int(begin), row + int(begin), int(end - begin))
        for begin, end in zip(edges[::2], edges[1::2], strict=True)
        if end - begin >= min_run
    ]
