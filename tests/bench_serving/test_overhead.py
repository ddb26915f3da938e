"""A tiny run of the overhead benchmark: every arm answers alike, and the rows are those that readers look for."""

import pytest

from bench_serving import overhead
from bench_serving.overhead_arms import EVICT, EXTEND, OURS, OUTPUT, THEIRS, Shape

SHAPE = {"tokens": 2048, "nodes": 200, "rounds": 6, "warmup": 2}


@pytest.fixture(scope="module")
def result():
    return overhead.run(Shape(**SHAPE))


def test_arms_agree_on_lengths(result):
    arms = (*OURS, *THEIRS)
    assert set(result.lengths) == set(arms)
    for workload in overhead.WORKLOADS:
        first = result.lengths["radix_cache"][workload]
        assert len(first) == SHAPE["rounds"] * (2 if workload.startswith("evict") else 1)
        if not workload.startswith("evict"):
            assert all(result.lengths[arm][workload] == first for arm in arms), workload
        assert all(len(result.micros[arm][workload]) == len(first) for arm in arms)
    lengths = result.lengths["plt"]
    assert set(lengths["match/full_hit"]) == {SHAPE["tokens"]}
    assert all(SHAPE["tokens"] // 2 < length < SHAPE["tokens"] for length in lengths["match/mid_node"])
    assert set(lengths["match/miss"]) == {0}
    assert set(lengths["checkpoint/extend"]) == {SHAPE["tokens"] + EXTEND}
    assert set(lengths["checkpoint/finish"]) == {SHAPE["tokens"] + EXTEND + OUTPUT}
    assert all(length >= EVICT for arm in arms for length in result.lengths[arm]["evict/256"])
    assert result.lengths["plt_lru"]["evict/256"] == result.lengths["radix_cache"]["evict/256"]


def test_rows_and_table(result):
    rows = overhead.rows_of(result)
    found = {(row.metric, row.arm): row for row in rows}
    assert len(found) == len(rows)
    for workload in overhead.WORKLOADS:
        operation, _, name = workload.partition("/")
        for arm in ("vs_radix_cache", "vs_rust_core"):
            worst, row = found[f"{operation}_p50_ratio", arm], found[f"{operation}_p50_ratio", f"{arm}/{name}"]
            assert worst.value >= row.value
            assert row.unit == "ratio"
            assert 0 < row.lo <= row.value <= row.hi
        for arm in (*OURS, *THEIRS):
            p50, p99 = (found[f"{operation}_p{quantile}", f"{arm}/{name}"] for quantile in (50, 99))
            assert p50.unit == "us"
            assert p50.value <= p99.value
    for arm in OURS:
        row = found["policy_per_evicted_token", arm]
        assert row.unit == "us"
        assert 0 < row.lo <= row.value <= row.hi
    assert all(us > 0 for us in result.learning["plt"])
    assert "vs_rust_core" in overhead.table(rows)


def test_paged_pool():
    paged = overhead.run(Shape(**SHAPE, page_size=16))
    assert set(paged.lengths["plt_cold"]["match/full_hit"]) == {SHAPE["tokens"]}


@pytest.mark.parametrize("wrong", [{"tokens": 1000}, {"page_size": 48}, {"rounds": 10**6}])
def test_shape_refuses(wrong):
    with pytest.raises(ValueError, match=r"tokens|page_size|rounds"):
        Shape(**wrong)
