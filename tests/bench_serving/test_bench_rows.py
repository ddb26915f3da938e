"""Rows of hand-made records: exact values, failures in every rate, ratios over the same sessions."""

import dataclasses

import numpy as np
import pytest

from bench_serving.bench_files import Directory
from bench_serving.bench_rows import Target, ratio_rows, rows_of, sample_rows, warm_rows
from bench_serving.resample import Interval, Sample
from sglang_plt.results import Row
from tests.bench_serving.bench_data import make_directory, records

NAMES = ["s0", "s1", "s2", "s3"]
AT_LEAST_2, AT_MOST_HALF = Target("r", 2.0, True), Target("r", 0.5, False)
REQUIRED = ("cached_share", "ttft_p50_ms", "ttft_p99_ms", "throughput_tok_s", "failed_share")


def by_metric(rows):
    found = {row.metric: row for row in rows}
    assert len(found) == len(rows)
    return found


def sample(*repeats, names=NAMES):
    return Sample(dict(enumerate(repeats)), names)


def test_values_of_one_arm():
    rows = by_metric(sample_rows(sample(records(1.0, 0.5)), "chat/default/pressure"))
    # turns of 100, 204 and 308 tokens; the first is never cached
    assert rows["cached_share"].value == pytest.approx((102 + 154) / 612)
    assert rows["ttft_p50_ms"].value == pytest.approx(1150)
    assert rows["ttft_p99_ms"].value == pytest.approx(1300)
    assert rows["ttft_first_p50_ms"].value == pytest.approx(2000)
    assert rows["throughput_tok_s"].value == pytest.approx(48 / (4 * 3 + 2 * 4.6 + 8))
    assert rows["failed_share"].value == 0
    assert (rows["ttft_p50_ms"].n, rows["cached_share"].n) == (8, 12)
    for metric in REQUIRED:
        row = rows[metric]
        assert row.arm == "chat/default/pressure"
        assert row.lo <= row.value <= row.hi
    assert 1000 <= rows["ttft_p50_ms"].lo < 1150 < rows["ttft_p50_ms"].hi <= 1300


def test_failures_count():
    whole = by_metric(sample_rows(sample(records(1.0, 0.5)), "x"))
    some = by_metric(sample_rows(sample(records(1.0, 0.5, failed=[(0, 1), (1, 2)])), "x"))
    assert some["failed_share"].value == pytest.approx(2 / 12)
    assert some["failed_share"].lo < 2 / 12 < some["failed_share"].hi
    assert some["ttft_p50_ms"].n == 6
    assert some["cached_share"].value < whole["cached_share"].value
    span = 4 * 3 + 2 * 4.6 + 8 - (2.0 + 2.1) + 2 * 1.0
    assert some["throughput_tok_s"].value == pytest.approx(40 / span)


def test_what_was_not_sent_counts_as_failed():
    lines = records(1.0, 0.5, failed=[(0, 1)])
    lines = [
        dataclasses.replace(
            r, prompt_tokens=0, e2e_s=0.0, ttft_s=None, output_ids=(), cached_tokens=0, error="not sent"
        )
        if (r.session, r.turn) == ("s0", 2)
        else r
        for r in lines
    ]
    rows = by_metric(sample_rows(sample(lines), "x"))
    assert rows["failed_share"].value == pytest.approx(2 / 12)


def test_nothing_answered():
    lines = records(1.0, 0.5, failed=[(i, t) for i in range(4) for t in range(3)])
    rows = by_metric(sample_rows(sample(lines), "x"))
    assert set(rows) == {"cached_share", "throughput_tok_s", "failed_share"}
    assert (rows["failed_share"].value, rows["throughput_tok_s"].value) == (1, 0)
    assert not ratio_rows({0: records(1.0, 0.5)}, {0: lines}, "x")


def test_repeats_add_up():
    one, both = records(1.0, 0.5), sample(records(1.0, 0.5), records(3.0, 0.5))
    rows = by_metric(sample_rows(both, "x"))
    assert rows["throughput_tok_s"].value == pytest.approx(96 / (29.2 + 29.2 + 2 * 9.2))
    assert rows["ttft_p50_ms"].n == 16
    # which of the repeats is drawn matters more than which sessions
    assert rows["ttft_p50_ms"].hi > by_metric(sample_rows(sample(one), "x"))["ttft_p50_ms"].hi * 2


def test_ratios_are_paired():
    slow, fast = {0: records(1.0, 0.2)}, {0: records(0.5, 0.6)}
    rows = by_metric(ratio_rows(fast, slow, "x"))
    for metric, value in (("ttft_p50_ratio", 0.5), ("cached_share_ratio", 3.0)):
        # sessions differ among themselves, the pairs do not
        assert rows[metric].value == pytest.approx(value, rel=0.02)
        assert rows[metric].hi - rows[metric].lo < 0.02 * value
    row = rows["throughput_ratio"]
    assert row.value == pytest.approx(29.2 / 24.6)
    assert row.lo <= row.value <= row.hi < 1.3


def test_only_common_repeats_are_compared():
    ours, theirs = {0: records(0.5, 0.6), 1: records(9.0, 0.6)}, {0: records(1.0, 0.2)}
    assert by_metric(ratio_rows(ours, theirs, "x"))["ttft_p50_ratio"].value == pytest.approx(0.5)
    assert ratio_rows({1: ours[1]}, theirs, "x") == []


def test_no_ratio_to_nothing():
    rows = by_metric(ratio_rows({0: records(0.5, 0.6)}, {0: records(1.0, 0.0)}, "x"))
    assert set(rows) == {"ttft_p50_ratio", "throughput_ratio"}


def test_draws_are_the_same_for_both_sides():
    a, b = sample(records(1.0, 0.5), records(1.0, 0.5)), sample(records(0.1, 0.1), records(0.1, 0.1))
    assert (a.weights() == b.weights()).all()
    assert (a.weights()[0] == 1).all()
    assert a.weights().shape == (1001, 24)
    assert Interval.of(np.array([np.nan, 1.0])) is None
    assert Interval.of(np.array([2.0, np.nan, np.inf])) == Interval(2.0, 2.0, 2.0)


def test_where_the_time_of_a_warm_request_goes():
    rows = by_metric(warm_rows({0: records(1.0, 0.5)}, {"restore": 0.8, "evict": 1.2}, "x"))
    assert rows["warm_restore_ms"].value == pytest.approx(100)  # of eight follow-ups
    assert rows["warm_evict_ms"].value == pytest.approx(100)  # of twelve requests
    assert rows["warm_answer_ms"].value == pytest.approx(1000)
    assert sum(row.value for row in rows.values()) == pytest.approx(2150)
    # 100 tokens are new; of 204 and 308, half is computed
    expected = 950 * (100 / 102 + 100 / 154) / 2
    assert rows["warm_new_ms"].value == pytest.approx(expected)
    assert rows["warm_again_ms"].value == pytest.approx(950 - expected)
    assert by_metric(warm_rows({0: records(1.0, 0.5)}, None, "x"))["warm_restore_ms"].value == 0
    assert warm_rows({0: records(1.0, 0.5, turns=1)}, None, "x") == []


def test_rows_of_a_run(tmp_path):
    make_directory(tmp_path, repeats=2, slow_probe="plt-raw")
    rows = {(row.metric, row.arm): row for row in rows_of(*Directory(tmp_path).read())}
    for condition in ("pressure", "fits"):
        for arm in ("default", "plt-raw", "plt-dense"):
            for metric in REQUIRED:
                assert rows[metric, f"chat/{arm}/{condition}"].hi is not None
    row = rows["ttft_p50_ratio", "chat/plt-dense/pressure"]
    assert (row.value, row.n) == (pytest.approx(0.25, rel=0.01), 24)
    assert ("ttft_p50_ratio", "chat/default/pressure") not in rows
    assert rows["working_set_over_bytes", "chat/pressure"].value == 4
    assert rows["total_bytes", "pressure"].value == 100_000
    assert rows["probe_ratio", "plt-raw/fits/1"].value == pytest.approx(1.3)
    assert (rows["disturbed", "plt-raw/fits/1"].value, rows["disturbed", "default/fits/1"].value) == (1, 0)


@pytest.mark.parametrize(
    ("target", "value", "lo", "hi", "verdict"),
    [
        (AT_LEAST_2, 2.0, 1.0, 3.0, "met"), (AT_LEAST_2, 1.9, 1.0, 2.1, "within the interval"),
        (AT_LEAST_2, 1.9, 1.0, 1.95, "missed"), (AT_MOST_HALF, 0.4, 0.3, 0.6, "met"),
        (AT_MOST_HALF, 0.6, 0.4, 0.7, "within the interval"), (AT_MOST_HALF, 9.0, 8.0, 9.5, "missed"),
    ],
)  # fmt: skip
def test_targets(target, value, lo, hi, verdict):
    assert target.verdict(Row("r", "x", value, "1", lo, hi)) == verdict
