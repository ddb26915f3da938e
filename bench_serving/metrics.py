"""Records of requests -> rows: pure functions. Failed requests count in every rate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench_serving.records import Record
from sglang_plt.results import Row

PERCENTILES = (50, 90, 99)
_DRAWS = 1000


@dataclass(frozen=True)
class SLO:
    """What a request must keep to count in the goodput; None does not ask for it.

    Attributes:
        ttft_s: most seconds to the first token.
        inter_token_s: most seconds between tokens, mean of the request.
        e2e_s: most seconds to the last token.
    """

    ttft_s: float | None = None
    inter_token_s: float | None = None
    e2e_s: float | None = None

    def kept(self, record: Record) -> bool:
        """Whether ``record`` was answered, and in time."""
        gaps = record.inter_token_s
        found = (record.ttft_s, sum(gaps) / len(gaps) if gaps else 0.0, record.e2e_s)
        limits = (self.ttft_s, self.inter_token_s, self.e2e_s)
        return record.ok and all(
            limit is None or (value is not None and value <= limit) for value, limit in zip(found, limits, strict=True)
        )


def bootstrap(
    groups: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], float], seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of a statistic of all values; whole groups are drawn with replacement, one for each request.

    The interval is widened to hold the value itself. None for fewer than two groups.
    """
    if len(groups) < 2:
        return None
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    lengths = np.array([len(group) for group in groups])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    draws = np.random.default_rng(seed).integers(0, len(groups), (_DRAWS, len(groups)))
    if (lengths == 1).all():
        found = [statistic(values[draw]) for draw in draws]
    else:
        pieces = [values[start:end] for start, end in zip(starts, ends, strict=True)]
        found = [statistic(np.concatenate([pieces[index] for index in draw])) for draw in draws]
    lo, hi = (float(np.percentile(found, percent)) for percent in (2.5, 97.5))
    value = statistic(values)
    return min(lo, value), max(hi, value)


def _row(
    metric: str, arm: str, groups: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], float], unit: str
) -> Row:
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    interval = bootstrap(groups, statistic)
    lo, hi = interval if interval is not None else (None, None)
    return Row(metric, arm, statistic(values), unit, lo, hi, len(values))


def latency_rows(records: Iterable[Record], arm: str) -> list[Row]:
    """``ttft``, ``inter_token`` and ``e2e``, each ``_p50_ms``, ``_p90_ms`` and ``_p99_ms``; intervals over requests.

    Of answered requests alone, ``n`` of them (or of their gaps): a failure has no latency. Read them beside
    ``failed_share``. Nothing for what no request has.
    """
    answered = [record for record in records if record.ok]
    kinds: dict[str, list[list[float]]] = {
        "ttft": [[record.ttft_s] for record in answered if record.ttft_s is not None],
        "inter_token": [list(record.inter_token_s) for record in answered if record.inter_token_s],
        "e2e": [[record.e2e_s] for record in answered],
    }
    rows = []
    for kind, groups in kinds.items():
        for percent in PERCENTILES if groups else ():

            def statistic(values: np.ndarray, percent: int = percent) -> float:
                return 1000 * float(np.percentile(values, percent))

            rows.append(_row(f"{kind}_p{percent}_ms", arm, groups, statistic, "ms"))
    return rows


def _span_s(records: Sequence[Record]) -> float:
    """From the first request sent to the last one ended."""
    return max(record.started_at + record.e2e_s for record in records) - min(record.started_at for record in records)


def rate_rows(records: Sequence[Record], arm: str, slo: SLO | None = None) -> list[Row]:
    """``requests_per_s`` (answered), ``output_tokens_per_s`` (of answered requests), ``failed_share``.

    With ``slo`` also ``goodput_per_s``, requests a second that kept it, and ``slo_share``, their share of all requests.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError(f"{arm} has no records")
    span, count = max(_span_s(records), 1e-9), len(records)
    answered = [record for record in records if record.ok]
    tokens = sum(len(record.output_ids) for record in answered)
    rows = [
        Row("requests_per_s", arm, len(answered) / span, "1/s", n=count),
        Row("output_tokens_per_s", arm, tokens / span, "tokens/s", n=count),
        _row("failed_share", arm, [[float(not record.ok)] for record in records], _mean, "1"),
    ]
    if slo is not None:
        kept = [slo.kept(record) for record in records]
        rows.append(Row("goodput_per_s", arm, sum(kept) / span, "1/s", n=count))
        rows.append(_row("slo_share", arm, [[float(value)] for value in kept], _mean, "1"))
    return rows


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def cache_rows(records: Sequence[Record], arm: str) -> list[Row]:
    """``hit_rate``, ``cached_tokens_<tier>`` where the server says the tier, ``computed_tokens``.

    ``hit_rate`` is cached over prompt tokens of all requests; a failed one has its prompt tokens below the line and
    nothing above, whatever it was told. Its interval is over requests.

    Raises:
        ValueError: no record has a prompt.
    """
    sent = [record for record in records if record.prompt_tokens]
    if not sent:
        raise ValueError(f"{arm} has no record with a prompt")
    prompt = np.array([record.prompt_tokens for record in sent], dtype=np.float64)
    cached = np.array([record.cached_tokens if record.ok else 0 for record in sent], dtype=np.float64)

    def share(indices: np.ndarray) -> float:
        chosen: np.ndarray = indices.astype(np.int64)
        return float(cached[chosen].sum() / prompt[chosen].sum())

    rows = [_row("hit_rate", arm, [[float(index)] for index in range(len(sent))], share, "1")]
    tiers: dict[str, int] = {}
    for record in sent:
        for tier, count in ((record.cached_tokens_details or {}) if record.ok else {}).items():
            tiers[tier] = tiers.get(tier, 0) + count
    rows += [Row(f"cached_tokens_{tier}", arm, tiers[tier], "tokens", n=len(sent)) for tier in sorted(tiers)]
    rows.append(Row("computed_tokens", arm, sum(record.computed_tokens for record in sent), "tokens", n=len(sent)))
    return rows


def exact_match_row(records: Sequence[Record], reference: Iterable[Record], arm: str) -> Row:
    """``exact_match``: share of the reference's answered requests with the same output ids here; a failure has not.

    Histories hold the answers, so after a first difference later turns of a session answer another prompt.

    Raises:
        ValueError: the reference has answered nothing.
    """
    mine = {(record.session, record.turn): record for record in records if record.ok}
    same = []
    for wanted in reference:
        if wanted.ok:
            found = mine.get((wanted.session, wanted.turn))
            same.append([float(found is not None and found.output_ids == wanted.output_ids)])
    if not same:
        raise ValueError("the reference has answered nothing")
    return _row("exact_match", arm, same, _mean, "1")


def rows_of(
    records: Sequence[Record], arm: str, slo: SLO | None = None, reference: Sequence[Record] | None = None
) -> list[Row]:
    """All of the above."""
    rows = [*latency_rows(records, arm), *rate_rows(records, arm, slo), *cache_rows(records, arm)]
    return rows + ([exact_match_row(records, reference, arm)] if reference is not None else [])
