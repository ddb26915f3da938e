"""The results of a device check as a table; what was not measured stays empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_GPU = "no GPU was available: nothing was run"


def table(results: dict[str, Any]) -> str:
    """Markdown of the results by step, as :mod:`triton_ops.device_check` has them."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in results.items():
        if name != "device":
            kind, step = name.split("/", 1)
            parts.setdefault(kind, {})[step] = value
    lines = [
        "# Kernels on a GPU",
        "",
        "Written by `scripts/device_check.sh bench_serving/results/device.json`. Empty fields were not measured.",
        "",
        f"Device: **{results['device']}**",
        "",
        "## Bandwidth",
        "",
        "GB/s of encoded rows and pool rows, each once; `copy` is a torch copy of as many bytes, read and written.",
        "",
    ]
    steps = parts.pop("GB_per_s", {})
    rows = [
        [name, *_numbers(value, ("encode", "decode", "copy")), _ratio(value, "decode", "copy")]
        for name, value in steps.items()
    ]
    lines += _table(["model, codec, tokens", "encode", "decode", "copy", "decode / copy"], rows)
    lines += ["", "## Restore", "", "Milliseconds; `raw` copies unencoded rows from pinned memory, layer by layer.", ""]
    rows = [
        [name, *_numbers(value, ("device", "pinned", "raw")), _ratio(value, "raw", "pinned")]
        for name, value in parts.pop("restore_ms", {}).items()
    ]
    lines += _table(["model, codec, tokens", "device memory", "pinned memory", "raw, pinned", "raw / pinned"], rows)
    lines += ["", "## Calibrated codecs", "", "One layer, 8192 rows.", ""]
    names = ("ms", "torch_products_ms", "tflops")
    rows = [[name, *_numbers(value, names)] for name, value in parts.pop("unit", {}).items()]
    lines += _table(["model", "restore ms", "torch's products alone ms", "Tflop/s"], rows)
    lines += ["", "## Checks and tuning", ""]
    rows = [[f"{kind}/{name}", _shown(value)] for kind, steps in parts.items() for name, value in steps.items()]
    return "\n".join([*lines, *_table(["step", "result"], rows)]) + "\n"


def _numbers(value: Any, names: Sequence[str]) -> list[str]:
    if not isinstance(value, dict):
        return [_shown(value), *[""] * (len(names) - 1)]
    return [f"{value[name]:.4g}" for name in names]


def _ratio(value: Any, above: str, below: str) -> str:
    return f"{value[above] / value[below]:.2f}" if isinstance(value, dict) else ""


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "same bits" if value else "**differs**"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {entry['best']}" for name, entry in value.items())
    return str(value).replace("|", "/").replace("\n", " ")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
