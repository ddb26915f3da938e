"""The figures of the side-by-side benchmark, as PNGs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_serving.bench_files import Found, Run
from bench_serving.bench_plan import BASELINE, FITS
from bench_serving.bench_rows import WARM_PARTS, row_arm
from sglang_plt.results import Row

BYTES, CONTEXT, WARM = "bytes.png", "context.png", "warm.png"

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00", "#999999")
_MARKERS = "s^Dv<>PX"
_PARTS = {
    "restore": ("bringing rows back", "#009e73"),
    "evict": ("evicting", "#cc79a7"),
    "again": ("computing again what was there before", "#d55e00"),
    "new": ("computing what is new", "#56b4e9"),
    "answer": ("the answer, after its first token", "#bbbbbb"),
}
_PANELS = (
    ("cached_share", "cached share of prompt tokens"),
    ("ttft_p50_ms", "TTFT of follow-ups, median ms"),
    ("throughput_tok_s", "output tokens a second"),
)
_MIB = 1 << 20


class FigureError(RuntimeError):
    """The figures cannot be drawn; the message says what to install."""


def draw_all(run: Run, found: Found, rows: Sequence[Row], directory: Path) -> list[Path]:
    """Write what there is to draw; the files, in the order in which they are to be read.

    Raises:
        FigureError: matplotlib is missing.
        OSError: a file cannot be written.
    """
    drawn = [
        (BYTES, lambda: _by_bytes(run, rows)),
        (CONTEXT, lambda: _by_context(run, found)),
        (WARM, lambda: _warm(run, rows)),
    ]
    paths = []
    for name, draw in drawn:
        figure = draw()
        if figure is not None:
            figure.savefig(directory / name, dpi=150)
            paths.append(directory / name)
    return paths


def _panels(num_rows: int, num_columns: int, width: float, height: float) -> tuple[Any, list[list[Any]]]:
    """An empty figure and its axes, by row and column."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise FigureError("matplotlib is not installed: pip install 'sglang-plt[bench]'") from None
    figure = Figure(figsize=(width * num_columns, height * num_rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, color="0.9", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, [list(line) for line in axes]


def _styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """SGLang's own dashed, the default one black."""
    styles: dict[str, dict[str, Any]] = {}
    others = [arm for arm in arms if arm != BASELINE]
    for arm in arms:
        place = others.index(arm) if arm != BASELINE else 0
        styles[arm] = {
            "color": "black" if arm == BASELINE else _COLOURS[place % len(_COLOURS)],
            "marker": "o" if arm == BASELINE else _MARKERS[place % len(_MARKERS)],
            "linestyle": "-" if arm.startswith("plt-") else "--",
        }
    return styles


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, max(1, len(labels))), frameon=False)


def _by_bytes(run: Run, rows: Sequence[Row]) -> Any:
    """Cached share, time to the first token and throughput against bytes of KV; None where bytes are unknown."""
    values = {(row.metric, row.arm): row for row in rows}
    sizes = sorted(
        (total, condition) for condition in run.conditions if (total := run.total_bytes(condition)) is not None
    )
    if not sizes:
        return None
    figure, axes = _panels(len(run.workloads), len(_PANELS), 4.2, 3.2)
    for line, workload in zip(axes, run.workloads, strict=True):
        for axis, (metric, label) in zip(line, _PANELS, strict=True):
            for arm, style in _styles(run.arms).items():
                points = [
                    (total / _MIB, row)
                    for total, condition in sizes
                    if (row := values.get((metric, row_arm(workload, arm, condition)))) is not None
                ]
                _interval_line(axis, points, arm, style)
            # the conditions by name, so that few points on a logarithmic scale still have labels
            axis.set_xscale("log")
            ticks = [total / _MIB for total, _ in sizes]
            axis.set_xticks(
                ticks, [f"{_short(tick)}\n{condition}" for tick, (_, condition) in zip(ticks, sizes, strict=True)]
            )
            axis.minorticks_off()
            axis.margins(x=0.15)
            axis.set_ylim(0, 1 if metric == "cached_share" else None)
            axis.set_xlabel("MiB of KV, all included")
            axis.set_ylabel(label)
            axis.set_title(workload, fontsize=10)
    _legend(figure, axes[0][0])
    return figure


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _interval_line(axis: Any, points: Sequence[tuple[float, Row]], label: str, style: dict[str, Any]) -> None:
    xs, ys = [x for x, _ in points], [row.value for _, row in points]
    axis.plot(xs, ys, label=label, markersize=5, linewidth=1.5, **style)
    for x, row in points:
        if row.lo is not None and row.hi is not None:
            axis.vlines(x, row.lo, row.hi, color=style["color"], linewidth=1, alpha=0.6)


def _tightest(run: Run) -> str:
    """The condition with the most pressure, which figures of one condition are of."""
    sizes = [(total, c) for c in run.conditions if c != FITS and (total := run.total_bytes(c)) is not None]
    return min(sizes)[1] if sizes else next(iter(run.conditions))


def _by_context(run: Run, found: Found) -> Any:
    """Time to the first token of follow-ups against the length of the prompt: a dot each, a line through medians."""
    condition = _tightest(run)
    figure, axes = _panels(1, len(run.workloads), 5.5, 3.8)
    for axis, workload in zip(axes[0], run.workloads, strict=True):
        for arm, style in _styles(run.arms).items():
            repeats = found.get((workload, arm, condition), {})
            points = sorted(
                (record.prompt_tokens, record.ttft_s)
                for records in repeats.values()
                for record in records
                if record.ok and record.ttft_s is not None and record.turn > 0
            )
            axis.plot(*_columns(points), linestyle="", alpha=0.25, markersize=3, **_only_marker(style))
            axis.plot(*_columns(_medians(points)), label=arm, markersize=5, linewidth=1.5, **style)
        axis.set_xlim(0, None)
        axis.set_ylim(0, None)
        axis.set_xlabel("tokens of the prompt, follow-up turns")
        axis.set_ylabel("TTFT, s")
        axis.set_title(f"{workload}, {condition}", fontsize=10)
    _legend(figure, axes[0][0])
    return figure


def _only_marker(style: dict[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "marker": style["marker"], "markeredgewidth": 0}


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _medians(points: Sequence[tuple[int, float]], groups: int = 6) -> list[tuple[float, float]]:
    """Medians of ``groups`` parts of sorted points of about the same size; requests of one length stay together."""
    parts: list[list[tuple[int, float]]] = []
    for point in points:
        if not parts or (len(parts[-1]) >= len(points) / groups and point[0] != parts[-1][-1][0]):
            parts.append([])
        parts[-1].append(point)
    middle: Callable[[list[float]], float] = statistics.median
    return [(middle([x for x, _ in part]), middle([y for _, y in part])) for part in parts]


def _warm(run: Run, rows: Sequence[Row]) -> Any:
    """Where the time of a follow-up request goes: a bar an arm; None where there are no such requests."""
    values = {(row.metric, row.arm): row.value for row in rows}
    conditions = list(dict.fromkeys((_tightest(run), *(c for c in run.conditions if c == FITS))))
    if not any(metric.startswith("warm_") for metric, _ in values):
        return None
    height = 0.9 + 0.35 * len(run.arms)
    figure, axes = _panels(len(conditions), len(run.workloads), 5.5, height)
    for line, condition in zip(axes, conditions, strict=True):
        for axis, workload in zip(line, run.workloads, strict=True):
            left = [0.0] * len(run.arms)
            for part in WARM_PARTS:
                name, colour = _PARTS[part]
                widths = [values.get((f"warm_{part}_ms", row_arm(workload, arm, condition)), 0.0) for arm in run.arms]
                axis.barh(range(len(run.arms)), widths, left=left, color=colour, label=name, height=0.6)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            axis.set_yticks(range(len(run.arms)), run.arms)
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.set_xlabel("ms of a follow-up request, mean")
            axis.set_title(f"{workload}, {condition}", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 + len(run.workloads), frameon=False, fontsize=9)
    return figure
