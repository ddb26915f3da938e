"""The table of the side-by-side benchmark, for a README, and what is said of noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_serving.bench_files import Run
from bench_serving.bench_plan import BASELINE
from bench_serving.bench_rows import row_arm, targets
from bench_serving.noise import OTHERS_LIMIT, PROBE_LIMIT
from sglang_plt.results import Row

COLUMNS = (
    ("cached_share", "cached share", ".1%"),
    ("ttft_p50_ms", "TTFT p50, ms", ",.0f"),
    ("ttft_p99_ms", "TTFT p99, ms", ",.0f"),
    ("throughput_tok_s", "output tokens/s", ".2f"),
    ("failed_share", "failed", ".1%"),
)
RAW = "plt-raw"
RATIOS = (
    ("cached_share_ratio", "cached share"),
    ("ttft_p50_ratio", "TTFT p50"),
    ("throughput_ratio", "throughput"),
)


@dataclass(frozen=True)
class Line:
    """One arm of one workload under one condition, as text.

    Attributes:
        cells: of :data:`COLUMNS` and of :data:`RATIOS`; a dash where there is no such number.
    """

    workload: str
    condition: str
    arm: str
    cells: list[str]
    ratios: list[str]


def lines_of(run: Run, rows: Sequence[Row]) -> list[Line]:
    """All that have been measured."""
    found = {(row.metric, row.arm): row for row in rows}
    lines = []
    for workload in run.workloads:
        for condition in run.conditions:
            for arm in run.arms:
                name = row_arm(workload, arm, condition)
                if ("failed_share", name) in found:
                    cells = [_value(found.get((metric, name)), form) for metric, _, form in COLUMNS]
                    ratios = [_interval(found.get((metric, name))) for metric, _ in RATIOS]
                    lines.append(Line(workload, condition, arm, cells, ratios))
    return lines


def _value(row: Row | None, form: str) -> str:
    return "-" if row is None else format(row.value, form).replace("%", " %")


def _interval(row: Row | None) -> str:
    if row is None:
        return "-"
    digits = 3 if row.value < 2 else 2
    return f"{row.value:.{digits}f} [{row.lo:.{digits}f}, {row.hi:.{digits}f}]"


def table(run: Run, rows: Sequence[Row]) -> str:
    """A line an arm, ratios against the default server with their 95 % intervals, then what disturbed the run."""
    heads = ["workload", "condition", "arm", *(title for _, title, _ in COLUMNS)]
    with_ratios = BASELINE in run.arms and len(run.arms) > 1
    heads += [f"{title} / {BASELINE}" for _, title in RATIOS] if with_ratios else []
    text = [_line(heads), "|" + "---|" * len(heads)]
    for line in lines_of(run, rows):
        cells = [line.workload, line.condition, f"`{line.arm}`", *line.cells]
        text.append(_line([*cells, *line.ratios] if with_ratios else cells))
    return "\n".join([*text, "", noise_sentence(run)]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def noise_sentence(run: Run) -> str:
    """Which servers were measured on a machine that did something else as well."""
    bad = [f"{n.arm} ({n.condition}, repeat {n.repeat + 1})" for n in run.notes if run.disturbed(n)]
    limits = f"a CPU probe more than {PROBE_LIMIT - 1:.0%} slower, or more than {OTHERS_LIMIT:.0%} of the cores' time "
    limits += "taken by others"
    if not run.notes:
        return "No server was measured to its end."
    if not bad:
        return f"Undisturbed: none of {len(run.notes)} servers saw {limits}.".replace("%", " %")
    return f"DISTURBED: {len(bad)} of {len(run.notes)} servers saw {limits}: {', '.join(bad)}.".replace("%", " %")


@dataclass(frozen=True)
class Verdict:
    """How one arm stands with one target."""

    arm: str
    metric: str
    target: str
    measured: str
    verdict: str


def verdicts(run: Run, rows: Sequence[Row]) -> list[Verdict]:
    """Every ratio that has a target; none for ``plt-raw``, which stands for what others do."""
    found = {(row.metric, row.arm): row for row in rows}
    return [
        Verdict(name, target.metric, str(target), _interval(row), target.verdict(row))
        for workload in run.workloads
        for condition in run.conditions
        for arm in run.arms
        if arm.startswith("plt-") and arm != RAW
        for name in [row_arm(workload, arm, condition)]
        for target in targets(condition)
        if (row := found.get((target.metric, name))) is not None
    ]
