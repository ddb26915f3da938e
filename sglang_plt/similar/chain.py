"""The best monotone chain of runs, from all places where two sequences have the same n-gram.

A match is a place ``(reference, target)`` of one n-gram in both; matches that follow each other on a diagonal are a
segment. Segments that lie apart from all others in both sequences belong to the answer as they are, and where two texts
are nearly equal these are nearly all; the rest goes through a search that is exact.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

Part = tuple[int, int, int]
"""``(reference, target, length)`` of a run."""


def best_chain(reference: np.ndarray, target: np.ndarray, gram: int) -> list[Part]:
    """The chain of runs of at least ``gram`` tokens that covers most tokens.

    Args:
        reference, target: int64 [p], first tokens of the matches, ascending by reference and then target, each once.
        gram: tokens of an n-gram.

    Returns:
        Runs, ascending and without overlap in both sequences. No chain of runs within the matches covers more. Costs
        ``p log p``.
    """
    if not len(reference):
        return []
    order, fresh = _by_diagonal(reference, target)
    first = order[fresh]
    length = np.diff(np.append(np.flatnonzero(fresh), len(order))) + (gram - 1)
    by_reference = np.lexsort((target[first], reference[first]))
    start, other, length = reference[first][by_reference], target[first][by_reference], length[by_reference]

    # a cut is where all segments before end before all segments behind begin
    cut: np.ndarray = np.ones(len(start) + 1, dtype=bool)
    ahead = np.minimum.accumulate(other[::-1])[::-1]
    cut[1:-1] = np.maximum.accumulate(start + length)[:-1] <= start[1:]
    cut[1:-1] &= np.maximum.accumulate(other + length)[:-1] <= ahead[1:]
    apart = cut[1:] & cut[:-1]
    parts = list(zip(start[apart].tolist(), other[apart].tolist(), length[apart].tolist(), strict=True))
    if not apart.all():
        by_segment: np.ndarray = np.empty(len(start), dtype=bool)
        by_segment[by_reference] = ~apart
        contested: np.ndarray = np.empty(len(order), dtype=bool)
        contested[order] = by_segment[np.cumsum(fresh) - 1]
        parts += _search(reference[contested], target[contested], gram)
        parts.sort()
    return parts


def _by_diagonal(reference: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matches by diagonal, and which of them follow none."""
    diagonal = target - reference
    order = np.lexsort((reference, diagonal))
    along, diagonal = reference[order], diagonal[order]
    fresh: np.ndarray = np.ones(len(order), dtype=bool)
    fresh[1:] = (along[1:] != along[:-1] + 1) | (diagonal[1:] != diagonal[:-1])
    return order, fresh


def _search(reference: np.ndarray, target: np.ndarray, gram: int) -> list[Part]:
    """``best_chain`` by dynamic programming over matches.

    The best chain that ends with a match either goes on from the match before it on its diagonal, or begins a run
    behind the best chain that ends before it in both sequences. The latter is looked up in a front: of all matches that
    end early enough in the reference, those that no other beats with a smaller target.
    """
    order, fresh = _by_diagonal(reference, target)
    before = np.full(len(order), -1)
    before[order[1:]] = np.where(fresh[1:], -1, order[:-1])
    sources, targets, previous = reference.tolist(), target.tolist(), before.tolist()
    score, link = [0] * len(sources), [-1] * len(sources)
    columns: list[int] = []  # the front: ascending targets, ascending scores
    values: list[int] = []
    points: list[int] = []
    entering = 0
    for point, source in enumerate(sources):
        while sources[entering] + gram <= source:
            value, column = score[entering], targets[entering]
            at = bisect_right(columns, column)
            if not at or values[at - 1] < value:
                stop = bisect_right(values, value, at)
                if at and columns[at - 1] == column:
                    at -= 1
                columns[at:stop], values[at:stop], points[at:stop] = [column], [value], [entering]
            entering += 1
        at = bisect_right(columns, targets[point] - gram)
        value, link[point] = (values[at - 1] + gram, points[at - 1]) if at else (gram, -1)
        back = previous[point]
        if back >= 0 and score[back] + 1 >= value:
            value, link[point] = score[back] + 1, back
        score[point] = value

    parts = []
    point = score.index(max(score))
    while point >= 0:
        last = point
        while link[point] >= 0 and link[point] == previous[point]:
            point = link[point]
        parts.append((sources[point], targets[point], sources[last] - sources[point] + gram))
        point = link[point]
    return parts[::-1]
