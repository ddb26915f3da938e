"""Records of a benchmark -> rows: pure functions. An arm of a row is ``<workload>/<arm>/<condition>``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench_serving.bench_files import Found, Note, Run
from bench_serving.bench_plan import BASELINE, FITS
from bench_serving.records import Record
from bench_serving.resample import Interval, Sample, Values
from sglang_plt.results import Row

WARM_PARTS = ("restore", "evict", "again", "new", "answer")
"""Where the time of a follow-up request goes, see :func:`warm_rows`."""


def row_arm(workload: str, arm: str, condition: str) -> str:
    return f"{workload}/{arm}/{condition}"


def rows_of(run: Run, found: Found) -> list[Row]:
    """Rows of every arm, their ratios against the ``default`` server, and of the run.

    ``cached_share``, ``ttft_p50_ms`` and ``ttft_p99_ms`` (of follow-up turns), ``ttft_first_p50_ms``,
    ``throughput_tok_s`` (output tokens), ``failed_share``; ``cached_share_ratio``, ``ttft_p50_ratio`` and
    ``throughput_ratio``, over the repeats that both have. A ratio to nothing is left out.
    """
    rows = list(_run_rows(run))
    for (workload, arm, condition), repeats in found.items():
        name = row_arm(workload, arm, condition)
        names = sorted({r.session for records in repeats.values() for r in records})
        rows += sample_rows(Sample(repeats, names), name)
        base = found.get((workload, BASELINE, condition))
        if base is not None and arm != BASELINE:
            rows += ratio_rows(repeats, base, name)
        rows += warm_rows(repeats, _seconds(run.notes, workload, arm, condition, repeats), name)
    return rows


def sample_rows(sample: Sample, arm: str) -> list[Row]:
    """The numbers of one arm."""
    weights, count = sample.weights(), len(sample.records)
    follow_ups, firsts = sample.count_ttft(), sample.count_ttft(follow_up=False)
    found: list[tuple[str, Values, str, int]] = [("cached_share", sample.cached_share(weights), "1", count)]
    if follow_ups:
        for percent in (50, 99):
            found.append((f"ttft_p{percent}_ms", 1000 * sample.ttft(weights, percent), "ms", follow_ups))
    if firsts:
        found.append(("ttft_first_p50_ms", 1000 * sample.ttft(weights, 50, follow_up=False), "ms", firsts))
    found.append(("throughput_tok_s", sample.throughput(weights), "tokens/s", count))
    found.append(("failed_share", sample.failed_share(weights), "1", count))
    return [row for metric, values, unit, n in found for row in _row(metric, arm, values, unit, n)]


def ratio_rows(mine: Mapping[int, Sequence[Record]], base: Mapping[int, Sequence[Record]], arm: str) -> list[Row]:
    """Ratios against the baseline; both have the same sessions and repeats in every draw."""
    common = sorted(set(mine) & set(base))
    if not common:
        return []
    names = sorted({r.session for side in (mine, base) for repeat in common for r in side[repeat]})
    ours, theirs = (Sample({repeat: side[repeat] for repeat in common}, names) for side in (mine, base))
    weights, base_weights = ours.weights(), theirs.weights()
    found = [
        ("cached_share_ratio", ours.cached_share(weights), theirs.cached_share(base_weights)),
        ("ttft_p50_ratio", ours.ttft(weights, 50), theirs.ttft(base_weights, 50)),
        ("throughput_ratio", ours.throughput(weights), theirs.throughput(base_weights)),
    ]
    return [
        row
        for metric, above, below in found
        if below[0] > 0
        for row in _row(metric, arm, above / _positive(below), "1", len(ours.records))
    ]


def _positive(values: Values) -> Values:
    """With NaN, which draws are left out for, in place of what cannot be divided by."""
    found = values.copy()
    found[~(found > 0)] = float("nan")
    return found


def _row(metric: str, arm: str, values: Values, unit: str, n: int) -> Iterator[Row]:
    interval = Interval.of(values)
    if interval is not None:
        yield Row(metric, arm, interval.value, unit, interval.lo, interval.hi, n)


def warm_rows(repeats: Mapping[int, Sequence[Record]], seconds: Mapping[str, float] | None, arm: str) -> list[Row]:
    """``warm_<part>_ms``: means over answered follow-up requests, which add up to their whole time.

    ``restore`` and ``evict`` are what these added to scheduling steps, as the server counts them, shared among
    follow-ups and among all requests. The rest of the time to the first token is split by tokens: ``again``, computed
    although it was sent or answered before, and ``new``. ``answer`` is from the first token to the last.
    """
    again = new = answer = first = 0.0
    count = total = 0
    for records in repeats.values():
        ok = {(r.session, r.turn): r for r in records if r.ok and r.ttft_s is not None}
        total += len(ok)
        for (session, turn), record in ok.items():
            before = ok.get((session, turn - 1))
            if before is None or record.ttft_s is None:
                continue
            fresh = max(1, record.prompt_tokens - before.prompt_tokens - len(before.output_ids))
            computed = max(1, record.computed_tokens)
            count += 1
            first += record.ttft_s
            answer += record.e2e_s - record.ttft_s
            new += record.ttft_s * min(1.0, fresh / computed)
            again += record.ttft_s * max(0.0, 1 - fresh / computed)
    if not count:
        return []
    moved = {"restore": 0.0, "evict": 0.0}
    if seconds is not None:
        moved = {"restore": seconds.get("restore", 0.0) / count, "evict": seconds.get("evict", 0.0) / total}
    left = max(0.0, 1 - sum(moved.values()) * count / first)
    parts = {**moved, "again": left * again / count, "new": left * new / count, "answer": answer / count}
    return [Row(f"warm_{part}_ms", arm, 1000 * parts[part], "ms", n=count) for part in WARM_PARTS]


def _seconds(
    notes: Sequence[Note], workload: str, arm: str, condition: str, repeats: Mapping[int, object]
) -> dict[str, float] | None:
    sums: dict[str, float] = {}
    for note in notes:
        if (note.arm, note.condition) == (arm, condition) and note.repeat in repeats:
            for name, value in note.seconds.get(workload, {}).items():
                sums[name] = sums.get(name, 0.0) + value
    return sums or None


def _run_rows(run: Run) -> Iterator[Row]:
    for condition in run.conditions:
        for workload, sizes in run.workloads.items():
            arm = f"{workload}/{condition}"
            yield Row("working_set_tokens", arm, sizes["working_set"], "tokens", n=sizes["requests"])
            pressure = run.pressure(workload, condition)
            if pressure is not None:
                yield Row("working_set_over_bytes", arm, pressure, "1")
        total = run.total_bytes(condition)
        if total is not None:
            yield Row("total_bytes", condition, total, "bytes")
    for note in run.notes:
        arm = f"{note.arm}/{note.condition}/{note.repeat}"
        yield Row("probe_ratio", arm, run.probe_ratio(note), "1")
        if note.others is not None:
            yield Row("others_share", arm, note.others, "1")
        yield Row("disturbed", arm, float(run.disturbed(note)), "1")


# -- what the run should show ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What a ratio should be: at least or at most ``bound``."""

    metric: str
    bound: float
    at_least: bool

    def verdict(self, row: Row) -> str:
        """``met``, ``within the interval`` (the interval reaches the bound), or ``missed``."""
        best = row.hi if self.at_least else row.lo

        def kept(value: float) -> bool:
            return value >= self.bound if self.at_least else value <= self.bound

        return "met" if kept(row.value) else "within the interval" if best is not None and kept(best) else "missed"

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.bound:g}"


UNDER_PRESSURE = (
    Target("cached_share_ratio", 2.0, True),
    Target("ttft_p50_ratio", 0.5, False),
    Target("throughput_ratio", 1.3, True),
)
WHERE_ALL_FITS = (Target("ttft_p50_ratio", 1.02, False), Target("throughput_ratio", 0.98, True))


def targets(condition: str) -> tuple[Target, ...]:
    return WHERE_ALL_FITS if condition == FITS else UNDER_PRESSURE
