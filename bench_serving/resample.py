"""Statistics of requests and of pairs of arms, with intervals from the same draws of sessions and repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench_serving.records import Record

DRAWS = 1000

Values = np.ndarray
"""Of a statistic: first of all requests, then of each draw; not finite where a draw has nothing to go by."""


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its 95 % interval, widened to hold it."""

    value: float
    lo: float
    hi: float

    @classmethod
    def of(cls, values: Values) -> Interval | None:
        """None where the value itself is not finite."""
        value, drawn = float(values[0]), values[1:]
        if not np.isfinite(value):
            return None
        drawn = drawn[np.isfinite(drawn)]
        lo, hi = (float(np.percentile(drawn, percent)) for percent in (2.5, 97.5)) if len(drawn) else (value, value)
        return cls(value, min(lo, value), max(hi, value))


class Sample:
    """The requests of one arm as columns.

    Args:
        repeats: of the arm; repeat -> records.
        names: of all sessions, the same for arms that are to be paired.
    """

    def __init__(self, repeats: Mapping[int, Sequence[Record]], names: Sequence[str]):
        place = {name: index for index, name in enumerate(names)}
        flat = [(number, record) for number, records in enumerate(repeats.values()) for record in records]
        self.records = [record for _, record in flat]
        self.shape = len(names), len(repeats)
        self.session = np.array([place[record.session] for record in self.records])
        self.repeat = np.array([number for number, _ in flat])
        self.ok = np.array([record.ok for record in self.records])
        self.follow_up = np.array([record.turn > 0 for record in self.records])
        self.prompt = self._column(lambda r: r.prompt_tokens)
        self.cached = self._column(lambda r: r.cached_tokens if r.ok else 0)
        self.tokens = self._column(lambda r: len(r.output_ids) if r.ok else 0)
        self.e2e_s = self._column(lambda r: r.e2e_s)
        self.ttft_s = self._column(lambda r: r.ttft_s if r.ok and r.ttft_s is not None else np.nan)
        self.span_s = sum(_span_s(records) for records in repeats.values())

    def _column(self, take) -> np.ndarray:
        return np.array([take(record) for record in self.records], dtype=np.float64)

    def weights(self, seed: int = 0) -> np.ndarray:
        """How often each request is in each draw, (1 + DRAWS, requests); the first line is of ones.

        Sessions and repeats are drawn with replacement. Samples of the same shape get the same draws.
        """
        rng = np.random.default_rng(seed)
        sessions, repeats = (
            np.vstack([np.ones(count), rng.multinomial(count, np.full(count, 1 / count), DRAWS)])
            for count in self.shape
        )
        return sessions[:, self.session] * repeats[:, self.repeat]

    # -- statistics -----------------------------------------------------------------------------------------------

    def cached_share(self, weights: np.ndarray) -> Values:
        """Cached over prompt tokens; a failed request has cached nothing."""
        return _over(weights @ self.cached, weights @ self.prompt)

    def failed_share(self, weights: np.ndarray) -> Values:
        return _over(weights @ ~self.ok, weights.sum(axis=1))

    def throughput(self, weights: np.ndarray) -> Values:
        """Output tokens of answered requests a second of the run.

        A draw has no length of its own: that of the run is scaled by the time that its requests took.
        """
        return _over(weights @ self.tokens, weights @ self.e2e_s) * float(self.e2e_s.sum() / max(self.span_s, 1e-9))

    def ttft(self, weights: np.ndarray, percent: float, *, follow_up: bool = True) -> Values:
        """A percentile of seconds to the first token: of follow-up turns, which have a history, or of first turns."""
        chosen = np.flatnonzero((self.follow_up == follow_up) & np.isfinite(self.ttft_s))
        chosen = chosen[np.argsort(self.ttft_s[chosen])]
        times: np.ndarray = self.ttft_s[chosen]
        counts: np.ndarray = weights[:, chosen].astype(int)
        found: list[np.ndarray] = [np.repeat(times, count) for count in counts]
        return np.array([np.percentile(values, percent) if len(values) else np.nan for values in found])

    def count_ttft(self, *, follow_up: bool = True) -> int:
        """Requests behind :meth:`ttft`."""
        return int(((self.follow_up == follow_up) & np.isfinite(self.ttft_s)).sum())


def _span_s(records: Sequence[Record]) -> float:
    return max(r.started_at + r.e2e_s for r in records) - min(r.started_at for r in records)


def _over(above: np.ndarray, below: np.ndarray) -> Values:
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below
