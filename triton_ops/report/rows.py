"""Report rows ``{metric, arm, value, unit, lo, hi, n}``, and when one is worse than another report's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GPUS = {
    80: {"name": "A100 80GB SXM", "bytes": 2.04e12, "fp32": 19.5e12, "tf32": 156e12},
    90: {"name": "H100 SXM", "bytes": 3.35e12, "fp32": 67e12, "tf32": 494e12},
    100: {"name": "B200", "bytes": 8.0e12, "fp32": 75e12, "tf32": 1100e12},
}
"""A GPU of each capability and its peaks a second, from NVIDIA's data sheets (dense)."""
_UNITS = {
    "registers": "registers",
    "spills": "bytes",
    "shared_bytes": "bytes",
    "bytes_per_row": "bytes",
    "operand_bytes_per_row": "bytes",
    "bytes_per_row_over_minimum": "ratio",
    "roofline_ns_per_row": "ns",
}
CHECKED = {
    **{"spills": 0.0, "registers": 0.0, "shared_bytes": 0.0},
    **{"bytes_per_row_over_minimum": 1e-6, "operand_bytes_per_row": 1e-6},
}
"""What must not grow, and by which share it may."""


def rows_of(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of compiled records (:mod:`triton_ops.report.compiled`), arm ``kernel/config/sm_cc``.

    A *row* is one token in one layer. ``bytes_per_row`` are traced; the minimum is every byte of encoded rows, of rows
    of components and of the pool that was touched, once. Tiles of a product read its operands again and again, from
    the second-level cache: these accesses are ``operand_bytes_per_row``, and ``bytes_per_row`` has what they read of
    rows and of the rotation's table once, and nothing of matrices, which are the same for all rows. The roofline, an
    estimate, is the larger of bytes over bandwidth and flops over peak.
    """
    rows = []
    for record in records:
        moved = record["read"] + record["written"]
        for capability, numbers in record["compiled"].items():
            gpu = GPUS[int(capability)]
            seconds = max(
                moved / gpu["bytes"], record["flops"] / gpu["fp32"] + record["dot_flops"] / gpu["tf32"]
            )  # fmt: skip
            values = {
                **numbers,
                "bytes_per_row": moved,
                "operand_bytes_per_row": record["operands"],
                "bytes_per_row_over_minimum": moved / record["minimum"],
                "roofline_ns_per_row": seconds * 1e9,
            }
            arm = f"{record['kernel'].split(':')[1].removesuffix('_kernel')}/{record['config']}/sm_{capability}"
            for metric, value in values.items():
                unit = _UNITS.get(metric, "instructions")
                row = {"metric": metric, "arm": arm, "value": round(value, 6), "unit": unit}
                rows.append({**row, "lo": None, "hi": None, "n": 1})
    return rows


def regressions(rows: list[dict[str, Any]], committed: list[dict[str, Any]], complete: bool = True) -> list[str]:
    """What of ``rows`` is worse than ``committed``, one line each.

    Args:
        complete: ``rows`` are of every configuration, so what is only in ``committed`` is missing.
    """
    old = {(row["metric"], row["arm"]): row["value"] for row in committed}
    found = []
    for row in rows:
        metric, arm, value = row["metric"], row["arm"], row["value"]
        if metric == "spills" and value > 0:
            found.append(f"{arm}: {value:g} bytes spilled, must be 0")
        elif (metric, arm) not in old:
            if metric == "registers":
                found.append(f"{arm}: not in the committed report")
        elif metric in CHECKED and value > old[metric, arm] * (1 + CHECKED[metric]):
            found.append(f"{arm}: {metric} {value:g}, was {old[metric, arm]:g}")
    arms = {row["arm"] for row in rows}
    missing = sorted({row["arm"] for row in committed} - arms) if complete else []
    return found + [f"{arm}: in the committed report only" for arm in missing]


def table(rows: list[dict[str, Any]]) -> str:
    """One line an arm."""
    by_arm: dict[str, dict[str, float]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], {})[row["metric"]] = row["value"]
    lines = [f"{'kernel/configuration/target':62} regs spill shared  bytes/row  /minimum  roofline ns"]
    for arm, numbers in by_arm.items():
        lines.append(
            f"{arm:62} {numbers['registers']:4.0f} {numbers['spills']:5.0f} {numbers['shared_bytes']:6.0f} "
            f"{numbers['bytes_per_row']:10.1f} {numbers['bytes_per_row_over_minimum']:9.3f} "
            f"{numbers['roofline_ns_per_row']:12.3f}"
        )
    return "\n".join(lines)
