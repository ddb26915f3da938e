"""One JSON line for every decision, so that the decisions of tensor-parallel ranks can be compared byte by byte."""

from __future__ import annotations

import json
from typing import TextIO


class DecisionLog:
    """Writes to ``<path>.tp<rank>``; without a path it costs one comparison a call."""

    def __init__(self, path: str | None, rank: int):
        self._file: TextIO | None = open(f"{path}.tp{rank}", "w") if path is not None else None  # noqa: SIM115

    @property
    def enabled(self) -> bool:
        return self._file is not None

    def record(self, event: str, **fields: int) -> None:
        """Append one decision; fields are integers that must not depend on the rank."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
