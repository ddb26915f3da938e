"""Where two token sequences hold the same tokens in the same order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_plt.similar.chain import Part, best_chain
from sglang_plt.similar.fragments import as_tokens, gram_hashes

_FREE_MATCHES = 2048  # a search costs about a microsecond a match
_MATCHES_PER_TOKEN = 2
_RARE = 4  # also keeps rare matches below one a token of both
_ROUNDS = 12

_Region = tuple[int, int, int, int]
"""``reference[first:second]`` against ``target[third:fourth]``."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal tokens: ``target[self.target : self.target + self.length] == reference[self.reference : ...]``."""

    reference: int
    target: int
    length: int


def align(reference: np.ndarray, target: np.ndarray, min_run: int = 16) -> list[Run]:
    """A monotone alignment of two token sequences (integers [n] and [m]).

    Runs ascend and do not overlap in both, and each is at least ``min_run`` long. Where two parts have changed places,
    the chain with more tokens wins.

    No other such runs cover more tokens when at most ``2048 + 2 * (n + m)`` pairs of places hold the same ``min_run``
    tokens, as in all texts that do not repeat themselves much. Else the common prefix and suffix are taken, then the
    best chain of those ``min_run`` tokens that are rare in both (the product of their counts is at most 4; unique ones
    are the anchors of patience diff, as Bram Cohen has it), then the gaps in the same way. Where nothing is rare, both
    sequences are cut in the middle. After 12 rounds gaps are left as they are.

    Regions of one round do not overlap, so each costs ``(n + m) log(n + m)`` at most. Memory is linear. Of equally
    good answers it is always the same one.

    Raises:
        TypeError: tokens that are no integers.
        ValueError: ``min_run`` below 1, or tokens that have not one dimension.
    """
    if min_run < 1:
        raise ValueError(f"min_run must be at least 1, got {min_run}")
    reference, target = as_tokens(reference), as_tokens(target)
    if len(reference) == len(target) and np.array_equal(reference, target):
        return [Run(0, 0, len(target))] if len(target) >= min_run else []
    return _Alignment(reference, target, min_run).runs()


class _Alignment:
    """One call of ``align``; ``parts`` holds what is found, in no order."""

    def __init__(self, reference: np.ndarray, target: np.ndarray, gram: int):
        self.reference = reference
        self.target = target
        self.gram = gram
        self.parts: list[Part] = []

    def runs(self) -> list[Run]:
        whole = (0, len(self.reference), 0, len(self.target))
        regions = self._split(whole, trimmed=False)
        for _ in range(_ROUNDS):
            regions = [part for region in regions for part in self._split(region)]
        return self._joined()

    def _split(self, region: _Region, trimmed: bool = True) -> list[_Region]:
        """Take the best chain of a region, or a part of it; what is left to be looked at."""
        begin, end, other_begin, other_end = region
        budget = _FREE_MATCHES + _MATCHES_PER_TOKEN * (end - begin + other_end - other_begin)
        found = _Matches(
            gram_hashes(self.reference[begin:end], self.gram),
            gram_hashes(self.target[other_begin:other_end], self.gram),
        )
        if found.total <= budget:
            self._take(region, found.places())
            return []
        if not trimmed:
            return self._trim(region)
        chain = self._take(region, found.places(_RARE))
        if chain:
            gaps = []
            for source, column, length in chain:
                gaps.append((begin, source, other_begin, column))
                begin, other_begin = source + length, column + length
            gaps.append((begin, end, other_begin, other_end))
        else:
            middle, other_middle = (begin + end) // 2, (other_begin + other_end) // 2
            gaps = [(begin, middle, other_begin, other_middle), (middle, end, other_middle, other_end)]
        return [part for gap in gaps for part in self._trim(gap)]

    def _take(self, region: _Region, places: tuple[np.ndarray, np.ndarray]) -> list[Part]:
        chain = [(i + region[0], j + region[2], length) for i, j, length in best_chain(*places, self.gram)]
        self.parts += chain
        return chain

    def _trim(self, region: _Region) -> list[_Region]:
        """Take the common prefix and suffix; the rest, unless it is too short to hold a run."""
        begin, end, other_begin, other_end = region
        prefix = _common(self.reference[begin:end], self.target[other_begin:other_end])
        if prefix:
            self.parts.append((begin, other_begin, prefix))
            begin, other_begin = begin + prefix, other_begin + prefix
        suffix = _common(self.reference[begin:end][::-1], self.target[other_begin:other_end][::-1])
        if suffix:
            end, other_end = end - suffix, other_end - suffix
            self.parts.append((end, other_end, suffix))
        return [(begin, end, other_begin, other_end)] if min(end - begin, other_end - other_begin) >= self.gram else []

    def _joined(self) -> list[Run]:
        """Neighbours on one diagonal made one, equal by their tokens and not only by hash, long enough."""
        joined: list[Part] = []
        for part in sorted(self.parts):
            if joined and _follows(joined[-1], part):
                source, column, length = joined.pop()
                part = (source, column, length + part[2])
            joined.append(part)
        return [Run(*piece) for part in joined for piece in self._equal(part) if piece[2] >= self.gram]

    def _equal(self, part: Part) -> list[Part]:
        source, column, length = part
        same = self.reference[source : source + length] == self.target[column : column + length]
        if same.all():
            return [part]
        # two n-grams had one hash: what is left between the tokens that differ
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])))).tolist()
        return [
            (source + first, column + first, stop - first) for first, stop in zip(edges[::2], edges[1::2], strict=True)
        ]


class _Matches:
    """Where two arrays of hashes hold the same value: counted first, listed on demand."""

    def __init__(self, reference: np.ndarray, target: np.ndarray):
        self.reference = reference
        self.order = np.argsort(target, kind="stable")
        ordered = target[self.order]
        self.first = ordered.searchsorted(reference)
        self.count = ordered.searchsorted(reference, side="right") - self.first
        self.total = int(self.count.sum())

    def places(self, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of places, int64, ascending; with ``most`` those of values of which there are no more pairs."""
        count = self.count
        if most is not None:
            ordered = np.sort(self.reference)
            own = ordered.searchsorted(self.reference, side="right") - ordered.searchsorted(self.reference)
            count = np.where(own * count <= most, count, 0)
        source: np.ndarray = np.repeat(np.arange(len(count)), count)
        within = np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
        places = self.first[source] + within
        return source, self.order[places]


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def _follows(part: Part, other: Part) -> bool:
    return part[0] + part[2] == other[0] and part[1] + part[2] == other[1]
