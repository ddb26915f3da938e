"""Which tokens of a prompt may take their KV rows from a donor prompt, and why not.

A *hunk* is where the two differ, between runs of tokens that both have in the same order. Tokens of hunks are always
computed, and the first few behind each as well: their rows deviate most. So do those behind an *echo*, a place where
the two tokens before a hunk come again: heads that continue a text as it went on before (induction heads, arXiv
2209.11895) look into the hunk from there. What is left of a run are the spans to reuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from sglang_plt.similar import Run, align

_FIRST_TOKENS = 4  # all others attend to these; where they differ everything does
_DEVIATION = 0.18
_SHARED = 8  # tokens of two hunks that make one the moved other
_ECHOES = 3  # of one hunk; what comes more often is common, and looks at many places


class Refusal(Enum):
    """Why nothing was reused; the values are labels of a metric."""

    REQUEST = "request"  # it asks for what reused tokens do not give
    NO_DONOR = "no_donor"
    FIRST_TOKENS = "first_tokens"
    MOVED = "moved"
    DIFFERENT = "different"
    SHORT = "short"
    BUSY = "busy"
    DONOR_GONE = "donor_gone"
    NO_ROOM = "no_room"
    UNKNOWN_MODE = "unknown_mode"


@dataclass(frozen=True)
class Limits:
    """When reuse is worth it, and how much may differ.

    Attributes:
        recompute: tokens computed behind every hunk and echo.
        max_difference: largest share of differing tokens among those up to the end of a span.
        max_difference_before: and among those before its start; rows that attend to little else deviate most.
        min_tokens: least tokens to reuse in all.
        min_span: shortest span.
        max_spans: most spans; each ends with a forward pass of its own.
        tail: last tokens of a prompt that are computed whatever they are.
    """

    recompute: int = 16
    max_difference: float = 0.02
    max_difference_before: float = 0.06
    min_tokens: int = 256
    min_span: int = 64
    max_spans: int = 4
    tail: int = 16


@dataclass(frozen=True)
class Span:
    """Positions ``[start, stop)`` of a prompt that hold the tokens of a donor from position ``donor`` on.

    Attributes:
        differing: tokens that differ before it.
    """

    start: int
    stop: int
    donor: int
    differing: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def predicted_deviation(self) -> float:
        """Squared distance of the rows from computed ones over their squared length, as a rule of thumb.

        In proportion to the share of differing tokens among those that rows attend to; the factor was fitted once to
        what ``bench_serving.near_miss`` measured.
        """
        return _DEVIATION * self.differing / self.stop


def plan_spans(
    donor: np.ndarray, tokens: np.ndarray, matched: int, page_size: int, limits: Limits, end: int | None = None
) -> list[Span] | Refusal:
    """What of ``tokens`` (integers [n]) may be reused from ``donor`` (integers [m]), in ascending order.

    Args:
        matched: tokens of the prompt whose own rows exist already.
        page_size: spans begin and end at whole pages.
        end: tokens from here on are computed, as the last ``limits.tail`` always are.
    """
    end = min(len(tokens) - limits.tail, len(tokens) if end is None else end)
    prefix = _common_prefix(donor, tokens)
    if prefix < _FIRST_TOKENS:
        return Refusal.FIRST_TOKENS
    behind = align(donor[prefix:], tokens[prefix:])
    runs = [Run(0, 0, prefix), *(Run(r.reference + prefix, r.target + prefix, r.length) for r in behind)]
    hunks = _hunks(runs, len(donor), len(tokens))
    if _moved([(donor[a:b], tokens[c:d]) for a, b, c, d in hunks]):
        return Refusal.MOVED
    echoes = _echoes(tokens[:end], hunks)
    spans, close, differing = [], 0, 0
    for run, (a, b, c, d) in zip(runs[1:], hunks, strict=False):
        differing += max(b - a, d - c)
        first = max(run.target + limits.recompute, matched + 1)
        alike = math.ceil(differing / limits.max_difference_before)
        for low, high in _between(first, min(run.target + run.length, end), echoes, limits.recompute):
            start, stop = _whole(max(low, alike) + page_size - 1, page_size), _whole(high, page_size)
            close += max(0, stop - low)
            if stop - start >= limits.min_span and differing <= limits.max_difference * stop:
                spans.append(Span(start, stop, run.reference + start - run.target, differing))
    longest = sorted(spans, key=len, reverse=True)[: limits.max_spans]
    if sum(map(len, longest)) < limits.min_tokens:
        return Refusal.DIFFERENT if close >= limits.min_tokens else Refusal.SHORT
    return sorted(longest, key=lambda span: span.start)


def _whole(length: int, page_size: int) -> int:
    return length - length % page_size


def _common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _hunks(runs: list[Run], donor_len: int, length: int) -> list[tuple[int, int, int, int]]:
    """``(first, end)`` in the donor and in the prompt of what lies behind each run."""
    edges = [*runs, Run(donor_len, length, 0)]
    return [
        (left.reference + left.length, right.reference, left.target + left.length, right.target)
        for left, right in pairwise(edges)
    ]


def _echoes(tokens: np.ndarray, hunks: list[tuple[int, int, int, int]]) -> list[int]:
    """Where the second of the two tokens before a hunk comes again behind the first, ascending."""
    pairs = tokens[:-1].astype(np.int64) << 32 | tokens[1:]
    found: set[int] = set()
    for _, _, begin, _ in hunks:
        if 2 <= begin <= len(pairs):
            again = np.flatnonzero(pairs[begin - 1 :] == pairs[begin - 2]) + begin
            found.update(again.tolist() if len(again) <= _ECHOES else ())
    return sorted(found)


def _between(first: int, stop: int, echoes: list[int], recompute: int) -> Iterator[tuple[int, int]]:
    """``[first, stop)`` without the tokens from every echo on that are computed."""
    for echo in echoes:
        if first <= echo < stop:
            yield first, echo
        if echo < stop:
            first = max(first, echo + max(1, recompute))
    yield first, stop


def _moved(hunks: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether another hunk holds in the donor what one holds in the prompt: half of it, or eight tokens."""
    for length in {_telling(ours) for _, ours in hunks if len(ours)}:
        places: dict[bytes, set[int]] = {}
        for number, (theirs, _) in enumerate(hunks):
            for part in _parts(theirs, length):
                places.setdefault(part, set()).add(number)
        for number, (_, ours) in enumerate(hunks):
            if not len(ours) or _telling(ours) != length:
                continue
            for part in _parts(ours, length):
                elsewhere = places.get(part, set()) - {number}
                if any(length > 1 or len(hunks[other][0]) == len(ours) for other in elsewhere):
                    return True
    return False


def _telling(tokens: np.ndarray) -> int:
    return 1 if len(tokens) == 1 else min(_SHARED, max(2, -(-len(tokens) // 2)))


def _parts(tokens: np.ndarray, length: int) -> list[bytes]:
    return [_bytes(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]


def _bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
