"""One JSON line a request: what was asked, what came back, and when."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """One request, whether it was answered or not.

    Attributes:
        session: name of the session.
        turn: index in the session.
        prompt_tokens: tokens sent; 0 where the request was not sent.
        started_at: seconds since the epoch.
        e2e_s: until the last token, or until it failed.
        ttft_s: until the first token; None where none came.
        inter_token_s: gaps between tokens after the first; a chunk of n tokens makes n equal gaps.
        output_ids: tokens of the answer, as far as it came.
        cached_tokens: prompt tokens that came from a cache, as the server says.
        cached_tokens_details: the same by tier (``device``, ``host``, ...), where the server says.
        error: why there is no whole answer; None where there is.
    """

    session: str
    turn: int
    prompt_tokens: int
    started_at: float
    e2e_s: float
    ttft_s: float | None = None
    inter_token_s: tuple[float, ...] = ()
    output_ids: tuple[int, ...] = ()
    cached_tokens: int = 0
    cached_tokens_details: dict[str, int] | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the server had to prefill; 0 for a failed request, of which nothing is known."""
        return self.prompt_tokens - self.cached_tokens if self.ok else 0


_FIELDS = {field.name for field in dataclasses.fields(Record)}


def write_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Write ``records`` to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    with Path(path).open("w", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n")


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file of :func:`write_records`.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no record; begins with file and line number.
    """
    found = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found.append(_record(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return found


def _record(values: Any) -> Record:
    if not isinstance(values, dict):
        raise ValueError(f"a record is a JSON object, got {type(values).__name__}")
    if unknown := sorted(set(values) - _FIELDS):
        raise ValueError(f"unknown field {', '.join(unknown)}")
    for name in ("inter_token_s", "output_ids"):
        values[name] = tuple(values.get(name, ()))
    return Record(**values)
