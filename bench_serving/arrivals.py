"""When sessions start."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench_serving.workloads import Session


@dataclass(frozen=True)
class ClosedLoop:
    """``concurrency`` sessions at a time, in order; one that thinks keeps its place."""

    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} must be at least 1")


@dataclass(frozen=True)
class RoundRobin:
    """One request at a time: the first turn of all sessions, then the second of all, ...; nobody thinks."""


@dataclass(frozen=True)
class Poisson:
    """Sessions start ``rate`` a second on average, at times drawn from ``seed``, whatever the server does."""

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError(f"rate={self.rate} must be above 0")


@dataclass(frozen=True)
class Timestamps:
    """Every session starts at its ``start_s``."""


Arrivals = ClosedLoop | RoundRobin | Poisson | Timestamps


def start_times(sessions: Sequence[Session], arrivals: Arrivals) -> list[float]:
    """Seconds after the start of the run at which each session may begin.

    Raises:
        ValueError: a session lacks the ``start_s`` that :class:`Timestamps` needs.
    """
    if isinstance(arrivals, Timestamps):
        times = []
        for session in sessions:
            if session.start_s is None:
                raise ValueError(f"{session.name} has no start_s; choose other arrivals")
            times.append(session.start_s)
        return times
    if isinstance(arrivals, Poisson):
        rng, now, times = random.Random(arrivals.seed), 0.0, []
        for _ in sessions:
            times.append(now)
            now += rng.expovariate(arrivals.rate)
        return times
    return [0.0] * len(sessions)
