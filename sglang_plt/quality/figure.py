"""The figure of a rate-distortion run: divergence against bits at every context, and bits by domain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_plt.codec import CODECS, PROFILED
from sglang_plt.quality.arms import DIVERGENCE, method_of
from sglang_plt.quality.curves import BITS_AT
from sglang_plt.quality.texts import KINDS
from sglang_plt.results import Row

_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999", "#7f6a00")
_MARKERS = "osD^vPX<>"
_KL_LIMITS = (DIVERGENCE / 30, DIVERGENCE * 40)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the figure as PNG (or what the suffix of ``path`` says).

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    values = {(row.metric, row.arm): row for row in rows}
    arms = [row.arm for row in rows if row.metric == "kl" and row.arm.endswith("/all")]
    contexts = sorted({int(arm.split("/")[1]) for arm in arms})
    visible = [arm for arm in arms if _KL_LIMITS[0] <= values["kl", arm].value <= _KL_LIMITS[1]]
    methods = list(dict.fromkeys(method_of(arm.split("/")[0]) for arm in visible))
    styles = _styles(methods)
    figure = Figure(figsize=(4.2 * (len(contexts) + 1), 4.0), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(1, len(contexts) + 1))
    for axis, context in zip(axes, contexts, strict=False):
        _curves(axis, values, arms, context, styles)
        axis.set_title(f"{context} tokens of prefix", fontsize=10)
        axis.sharey(axes[0])
    _domains(axes[-1], values, methods, contexts[0], styles)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(5, max(1, len(labels))), frameon=False, fontsize=8
    )
    figure.savefig(path)


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours as solid lines in front, published methods dashed."""
    styles = {}
    order = [method for group in (PROFILED, CODECS) for method in group if method in methods]
    for index, method in enumerate((*order, *(method for method in methods if method not in order))):
        ours = method in order
        styles[method] = {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": "-" if ours else "--",
            "linewidth": 2.0 if ours else 1.2,
            "markersize": 5 if ours else 4,
            "zorder": 3 if ours else 2,
        }
    return styles


def _curves(
    axis: Any, values: dict[tuple[str, str], Row], arms: Sequence[str], context: int, styles: dict[str, dict[str, Any]]
) -> None:
    points = defaultdict(list)
    for arm in arms:
        name, found, _ = arm.split("/")
        kl = values["kl", arm]
        if int(found) == context and kl.value > 0:
            points[method_of(name)].append((values["bits_per_value", arm].value, kl))
    shown = [0.0]
    for method, style in styles.items():
        line = sorted(points[method], key=lambda point: point[0])
        bits, kls = [x for x, _ in line], [kl.value for _, kl in line]
        axis.plot(bits, kls, label=method, **style)
        lows, highs = ([getattr(kl, end) or kl.value for _, kl in line] for end in ("lo", "hi"))
        axis.vlines(bits, lows, highs, color=style["color"], linewidth=1, alpha=0.6)
        shown += [x for x, y in zip(bits, kls, strict=True) if _KL_LIMITS[0] <= y <= _KL_LIMITS[1]]
    axis.axhline(DIVERGENCE, color="0.4", linewidth=0.8, linestyle=":")
    axis.annotate(f"{DIVERGENCE:g}", (0.01, DIVERGENCE), xycoords=("axes fraction", "data"), va="bottom", fontsize=8)
    axis.set_yscale("log")
    axis.set_ylim(*_KL_LIMITS)
    axis.set_xlim(0, max(shown) * 1.05 or 1.0)
    axis.set_xlabel("bits a value, all included")
    axis.set_ylabel("KL(exact || restored), nats a token")
    _plain(axis)


def _domains(
    axis: Any,
    values: dict[tuple[str, str], Row],
    methods: Sequence[str],
    context: int,
    styles: dict[str, dict[str, Any]],
) -> None:
    """Bits at the divergence of the target: a dot a domain, a bar for all of them."""
    kinds = ("all", *KINDS)
    found = {kind: {m: values.get((BITS_AT, f"{m}/{context}/{kind}")) for m in methods} for kind in kinds}
    ranked = sorted((row.value, method) for method, row in found["all"].items() if row is not None)
    for place, (bits, method) in enumerate(ranked):
        axis.barh(place, bits, color=styles[method]["color"], alpha=0.35, height=0.6)
        for kind, marker in zip(KINDS, "o^s", strict=True):
            row = found[kind][method]
            if row is not None:
                axis.plot(row.value, place, marker, color=styles[method]["color"], markersize=4.5, zorder=3)
    for kind, marker in zip(KINDS, "o^s", strict=True):
        axis.plot([], [], marker, color="0.3", markersize=4.5, label=kind)
    axis.set_yticks(range(len(ranked)), [method for _, method in ranked])
    axis.invert_yaxis()
    axis.set_xlabel(f"bits a value at KL {DIVERGENCE:g}")
    axis.set_title(f"by domain, {context} tokens of prefix", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, which="major", color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
