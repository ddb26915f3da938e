"""Metrics of hand-made records: exact values, and failures in every rate."""

import math

import numpy as np
import pytest

from bench_serving.divergence import kl_lower_bound, mean_kl
from bench_serving.metrics import SLO, bootstrap, cache_rows, exact_match_row, latency_rows, rate_rows, rows_of
from bench_serving.records import Record


def answered(index, ttft=0.1, gaps=(0.1, 0.1), cached=50, details=None, ids=(1, 2, 3), start=None):
    start = float(index) if start is None else start
    return Record(f"s{index}", 0, 100, start, ttft + sum(gaps), ttft, gaps, ids, cached, details)


def failed(index, prompt=100):
    return Record(f"s{index}", 0, prompt, float(index), 1.0, error="status 500", cached_tokens=prompt)


def by_metric(rows):
    found = {row.metric: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_percentiles_and_their_intervals():
    records = [answered(index, ttft=(index + 1) / 100, gaps=(0.01 * (index + 1),) * 3) for index in range(100)]
    rows = by_metric(latency_rows(records, "arm"))
    assert set(rows) == {f"{kind}_p{p}_ms" for kind in ("ttft", "inter_token", "e2e") for p in (50, 90, 99)}
    assert rows["ttft_p50_ms"].value == pytest.approx(505)
    assert rows["ttft_p90_ms"].value == pytest.approx(901)
    assert rows["inter_token_p50_ms"].value == pytest.approx(505)
    assert (rows["ttft_p50_ms"].n, rows["inter_token_p50_ms"].n) == (100, 300)
    for row in rows.values():
        assert row.lo <= row.value <= row.hi
        assert row.unit == "ms"
    assert 400 < rows["ttft_p50_ms"].lo < 480
    assert 530 < rows["ttft_p50_ms"].hi < 620


def test_failures_have_no_latency():
    rows = by_metric(latency_rows([answered(0), failed(1)], "arm"))
    assert rows["e2e_p50_ms"].n == 1
    assert rows["e2e_p50_ms"].lo is None
    assert latency_rows([failed(0)], "arm") == []


def test_failures_count_in_every_rate():
    records = [answered(0), answered(1, ttft=5.0), failed(2), failed(3)]
    rows = by_metric(rate_rows(records, "arm", SLO(ttft_s=1.0)))
    span = 1 + 5.2  # the second ends last
    assert rows["requests_per_s"].value == pytest.approx(2 / span)
    assert rows["output_tokens_per_s"].value == pytest.approx(6 / span)
    assert rows["failed_share"].value == 0.5
    assert rows["goodput_per_s"].value == pytest.approx(1 / span)
    assert rows["slo_share"].value == 0.25
    assert all(row.n == 4 for row in rows.values())
    assert rows["failed_share"].lo < 0.5 < rows["failed_share"].hi
    with pytest.raises(ValueError, match="no records"):
        rate_rows([], "arm")


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (SLO(), True), (SLO(0.1, 0.1, 0.31), True), (SLO(ttft_s=0.09), False), (SLO(inter_token_s=0.09), False),
        (SLO(e2e_s=0.29), False),
    ],
)  # fmt: skip
def test_an_slo(slo, kept):
    assert slo.kept(answered(0)) == kept
    assert not slo.kept(failed(0))


def test_cached_share_by_tokens_and_tiers():
    records = [
        answered(0, cached=90, details={"device": 40, "host": 50}),
        answered(1, cached=10, details={"device": 10, "host": 0}),
        answered(2, cached=0),
        failed(3),  # says 100 cached tokens, which nobody believes
        Record("s4", 1, 0, 4.0, 0.0, error="not sent: an earlier turn failed"),
    ]
    rows = by_metric(cache_rows(records, "arm"))
    assert rows["hit_rate"].value == 100 / 400
    assert rows["hit_rate"].lo <= 0.25 <= rows["hit_rate"].hi
    assert rows["cached_tokens_device"].value == 50
    assert rows["cached_tokens_host"].value == 50
    assert rows["computed_tokens"].value == 10 + 90 + 100
    with pytest.raises(ValueError, match="no record with a prompt"):
        cache_rows(records[-1:], "arm")


def test_exact_match_is_of_what_the_reference_answered():
    reference = [answered(0), answered(1), answered(2), answered(3), failed(4)]
    records = [answered(0), answered(1, ids=(1, 2)), failed(2), answered(4)]
    row = exact_match_row(records, reference, "arm")
    assert (row.value, row.n) == (0.25, 4)
    with pytest.raises(ValueError, match="answered nothing"):
        exact_match_row(records, [failed(0)], "arm")


def test_all_rows_together():
    records = [answered(0), failed(1)]
    rows = by_metric(rows_of(records, "arm", SLO(), records))
    assert {row.arm for row in rows.values()} == {"arm"}
    assert rows["exact_match"].value == 1
    assert {"ttft_p99_ms", "slo_share", "hit_rate", "failed_share"} <= set(rows)


def test_the_bootstrap_draws_whole_groups():
    groups = [[float(i)] * 10 for i in range(20)]
    lo, hi = bootstrap(groups, lambda values: float(values.mean()))
    plain_lo, plain_hi = bootstrap([[v] for g in groups for v in g], lambda values: float(values.mean()))
    assert lo < 9.5 < hi
    assert hi - lo > 2 * (plain_hi - plain_lo)
    assert bootstrap(groups, np.median) == bootstrap(groups, np.median)
    assert bootstrap(groups[:1], np.median) is None
    # the maximum is never above that of the sample: the interval is widened to hold it
    lo, hi = bootstrap([[float(i)] for i in range(5)], np.max)
    assert hi == 4


def test_the_divergence_is_a_lower_bound():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = (np.exp(rng.normal(0, 2, 200)) for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        whole = float((p * np.log(p / q)).sum())
        exact, other = ({int(i): math.log(values[i]) for i in np.argsort(values)[-20:]} for values in (p, q))
        assert 0 <= kl_lower_bound(exact, other) <= whole + 1e-9
        full = [{i: math.log(value) for i, value in enumerate(values)} for values in (p, q)]
        assert kl_lower_bound(*full) == pytest.approx(whole)
        assert kl_lower_bound(exact, exact) == 0
    assert mean_kl([exact, exact], [exact, other]) == pytest.approx(kl_lower_bound(exact, other) / 2)
    with pytest.raises(ValueError, match="shorter"):
        mean_kl([exact], [])
