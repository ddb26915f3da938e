"""Measured numbers as JSON, the same everywhere: ``{"rows": [{metric, arm, value, unit, lo, hi, n}, ...]}``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        metric: what was measured, for example ``ttft_p50``.
        arm: the side of a comparison it belongs to, for example ``plt-int8``.
        value: finite.
        unit: ``ms``, ``bytes``, ``tokens``; ``1`` for a share or ratio.
        lo: lower end of the 95 % interval; None where there is none.
        hi: its upper end.
        n: observations behind the value.
    """

    metric: str
    arm: str
    value: float
    unit: str
    lo: float | None = None
    hi: float | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.metric} of {self.arm} is {self.value}; a row holds a finite number")
        if (self.lo is None) != (self.hi is None):
            raise ValueError(f"{self.metric} of {self.arm} has lo={self.lo} and hi={self.hi}; give both or none")


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write ``rows`` to ``path``, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    text = json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}, indent=2, allow_nan=False)
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a file of :func:`write_rows`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        return [Row(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of rows: {error}") from None
