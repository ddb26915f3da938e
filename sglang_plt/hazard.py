"""How soon a prefix comes back: hazards by class and age, learned online in integers from what was served.

A *class* is a tuple of small integers that describes a prefix when it was last used. Its *hazard* in an age bracket is
the share of what reached the bracket unused that was used again in it. Counts are exact also for what has not come back
yet (Kaplan and Meier, J. Am. Stat. Assoc. 1958), in tokens, and kept for what was evicted too, so that no policy hides
from itself what it should have kept. A class with few observations leans on the class with its last entry cut off, down
to the empty class, as a PPM model falls back to a shorter context.

What a prefix is worth keeping for is the largest, over all times one may wait, of P(used again by then) / E[time
held until then]: the index of Gittins (J. Royal Stat. Soc. B 1979) for the retirement of a bandit's arm. Unlike the hit
density of LHD (Beckmann et al., NSDI 2018), the time held does not depend on what is evicted now.

No floats, no wall time: equal requests give equal indices on every rank. Age is counted in requests.
"""

from __future__ import annotations

from itertools import pairwise

Class = tuple[int, ...]

ONE = 1 << 20
"""Probability one."""

BOUNDS = (0, *(1 << power for power in range(1, 15)))
"""First age of every bracket, in requests; the last bracket is open."""

HORIZON = BOUNDS[-1]
_WIDTHS = (*(stop - start for start, stop in pairwise(BOUNDS)), HORIZON)
_BRACKETS = range(len(BOUNDS))
_FIRST_GUESS = ONE // 10000  # hazard of a bracket before anything was seen
_PRIOR_REQUESTS = 16  # a shorter class weighs as much as this many requests of mean length
_HALVE_EVERY = 2048  # requests until half of the counts is forgotten
_REFRESH_EVERY = 64  # requests that share one set of indices


def bracket_of(age: int) -> int:
    """The age bracket of ``age`` requests (at least 0)."""
    return min(max(age.bit_length() - 1, 0), len(BOUNDS) - 1)


class _Counts:
    """Tokens that reached a bracket unused, and those of them that were used again in it."""

    __slots__ = ("exposed", "reused")

    def __init__(self) -> None:
        self.exposed = [0] * len(BOUNDS)
        self.reused = [0] * len(BOUNDS)


class HazardTable:
    """Hazards and indices of the classes of one namespace.

    Attributes:
        version: changes when indices that were given before may be out of date.
    """

    def __init__(self) -> None:
        self.version = 0
        self._now = 0
        self._requests = 0
        self._tokens = 0
        self._counts: dict[Class, _Counts] = {}
        self._chains: dict[Class, tuple[_Counts, ...]] = {}
        self._waiting: dict[int, dict[Class, int]] = {}  # request -> class -> tokens not used again so far
        self._hazards: dict[Class, list[int]] = {}
        self._indices: dict[Class, list[int]] = {}

    # -- learning -------------------------------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        """Request ``now`` is the present: what was used ``BOUNDS[k]`` requests ago and not since enters bracket k.

        Call it once for every request, in order.
        """
        self._now = now
        waiting = self._waiting
        for bracket in _BRACKETS[1:]:
            for cls, tokens in waiting.get(now - BOUNDS[bracket], {}).items():
                for counts in self._chain(cls):
                    counts.exposed[bracket] += tokens
        waiting.pop(now - HORIZON, None)
        if now % _HALVE_EVERY == 0:
            for counts in self._counts.values():
                counts.exposed = [count >> 1 for count in counts.exposed]
                counts.reused = [count >> 1 for count in counts.reused]
        if now % _REFRESH_EVERY == 0:
            self.version += 1
            self._hazards.clear()
            self._indices.clear()

    def count_request(self, tokens: int) -> None:
        """A request of ``tokens`` tokens was served."""
        self._requests += 1
        self._tokens += tokens

    def used(self, cls: Class, tokens: int) -> None:
        """The present request used ``tokens`` tokens, which are of class ``cls`` from now on."""
        waiting = self._waiting.setdefault(self._now, {})
        waiting[cls] = waiting.get(cls, 0) + tokens
        for counts in self._chain(cls):
            counts.exposed[0] += tokens

    def reused(self, cls: Class, when: int, tokens: int) -> None:
        """The present request used ``tokens`` tokens again that were of class ``cls`` since request ``when``."""
        bracket = bracket_of(self._now - when)
        for counts in self._chain(cls):
            counts.reused[bracket] += tokens
        waiting = self._waiting.get(when)
        if waiting is not None and cls in waiting:
            waiting[cls] -= tokens

    def forget_waiting(self) -> None:
        """What is waiting can no longer be told to have come back; counts stay."""
        self._waiting.clear()

    def _chain(self, cls: Class) -> tuple[_Counts, ...]:
        chain = self._chains.get(cls)
        if chain is None:
            keys = [cls[:length] for length in range(len(cls) + 1)]
            chain = self._chains[cls] = tuple(self._counts.setdefault(key, _Counts()) for key in keys)
        return chain

    # -- asking ---------------------------------------------------------------------------------------------------

    def index(self, cls: Class, age: int) -> int:
        """Index of ``cls`` at ``age``: expected reuses per request of holding, times 2 ** 40.

        Straight between the starts of two brackets: steps would make equals of what is not, and order it by chance.
        """
        indices = self._indices.get(cls)
        if indices is None:
            indices = self._indices[cls] = indices_of(self.hazards(cls))
        bracket = bracket_of(age)
        if age >= HORIZON:
            return indices[bracket]
        start, stop = BOUNDS[bracket], BOUNDS[bracket + 1]
        return (indices[bracket] * (stop - age) + indices[bracket + 1] * (age - start)) // (stop - start)

    def hazards(self, cls: Class) -> list[int]:
        """Hazard of ``cls`` in every age bracket, in units of ``1 / ONE``."""
        found = self._hazards.get(cls)
        if found is None:
            below = self.hazards(cls[:-1]) if cls else [_FIRST_GUESS] * len(BOUNDS)
            counts = self._counts.get(cls)
            if counts is None:
                return below
            prior = _PRIOR_REQUESTS * (self._tokens // max(1, self._requests) + 1)
            found = self._hazards[cls] = [
                min(ONE, (counts.reused[k] * ONE + prior * below[k]) // (counts.exposed[k] + prior)) for k in _BRACKETS
            ]
        return found


def indices_of(hazards: list[int]) -> list[int]:
    """Gittins index at the start of every bracket (times 2 ** 40) for hazards in units of ``1 / ONE``.

    Within a bracket, reuse is taken to be spread evenly.
    """
    indices = []
    for bracket in _BRACKETS:
        alive, held, best = ONE, 0, 0
        for k in _BRACKETS[bracket:]:
            held += alive * (2 * ONE - hazards[k]) * _WIDTHS[k] >> 21
            alive = alive * (ONE - hazards[k]) >> 20
            if held:
                best = max(best, ((ONE - alive) << 40) // held)
        indices.append(best)
    return indices
