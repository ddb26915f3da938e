"""Results as a table, as rows of :mod:`sglang_plt.results`, and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_plt.results import Row
from sglang_plt.simulate.replay import Result

_HEADER = ("trace", "policy", "capacity", "ratio", "hit %", "hot %", "cold %", "saved s", "held GB", "us/evicted token")


class PlotError(RuntimeError):
    """The plot cannot be drawn; the message says what to install."""


def table_header() -> str:
    return _line(_HEADER)


def table_line(result: Result) -> str:
    cost = result.policy_us_per_evicted_token
    return _line(
        (
            result.trace,
            result.policy,
            str(result.capacity_tokens),
            f"x{float(result.codec_ratio):g}",
            f"{100 * result.hit_rate:.2f}",
            f"{100 * result.hot_hits / result.asked_tokens:.2f}",
            f"{100 * result.cold_hits / result.asked_tokens:.2f}",
            f"{result.saved_s:.0f}",
            f"{result.held_bytes / 1e9:.1f}",
            "-" if cost is None else f"{cost:.4f}",
        )
    )


def _line(cells: Sequence[str]) -> str:
    widths = (24, 8, 10, 6, 7, 7, 7, 9, 9, 17)
    return " ".join(
        cell.ljust(width) if index < 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def rows(results: Iterable[Result]) -> list[Row]:
    """Rows ``hit_rate``, ``saved_prefill_s`` and ``held_bytes``, and ``policy_us_per_evicted_token`` of policies."""
    found = []
    for result in results:
        found.append(Row("hit_rate", result.arm, result.hit_rate, "1", n=result.asked_tokens))
        found.append(Row("hot_hit_rate", result.arm, result.hot_hits / result.asked_tokens, "1", n=result.asked_tokens))
        found.append(
            Row("cold_hit_rate", result.arm, result.cold_hits / result.asked_tokens, "1", n=result.asked_tokens)
        )
        found.append(Row("saved_prefill_s", result.arm, result.saved_s, "s"))
        found.append(Row("held_bytes", result.arm, result.held_bytes, "bytes"))
        cost = result.policy_us_per_evicted_token
        if cost is not None and result.evicted_tokens:
            found.append(Row("policy_us_per_evicted_token", result.arm, cost, "us", n=result.evicted_tokens))
    return found


def plot(path: str | Path, results: Sequence[Result]) -> None:
    """Hit rate over capacity, one panel a trace, one line a policy and codec ratio.

    Raises:
        PlotError: matplotlib is missing, or does not know the file's format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("needs matplotlib, which is not installed: pip install 'sglang-plt[bench]'") from None
    traces = list(dict.fromkeys(result.trace for result in results))
    figure = Figure(figsize=(6 * len(traces), 4.5), layout="constrained")
    for column, trace in enumerate(traces):
        axes = figure.add_subplot(1, len(traces), column + 1)
        lines: dict[tuple[str, float], list[Result]] = {}
        for result in results:
            if result.trace == trace:
                lines.setdefault((result.policy, float(result.codec_ratio)), []).append(result)
        for (policy, ratio), line in lines.items():
            line.sort(key=lambda result: result.capacity_tokens)
            axes.plot(
                [result.capacity_tokens for result in line],
                [100 * result.hit_rate for result in line],
                marker="o",
                linestyle="--" if policy == "belady" else "-",
                label=policy if ratio == 1 else f"{policy} x{ratio:g}",
            )
        axes.set(
            title=trace, xscale="log", xlabel="capacity in bf16 tokens", ylabel="token hit rate in %", ylim=(0, None)
        )
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise PlotError(f"cannot be drawn: {error}") from None
