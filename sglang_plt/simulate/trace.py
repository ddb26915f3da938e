"""Request traces as sequences of units: Mooncake's blocks, or pages of a token-level trace.

Mooncake's format (FAST'25, kvcache-ai/Mooncake, ``FAST25-release/traces``) is one JSON object a line: ``timestamp`` in
ms, ``input_length`` and ``output_length`` in tokens, ``hash_ids`` with one id per started block of 512 prompt tokens;
equal ids are equal prefixes. A token-level line has ``timestamp``, ``output_length`` and ``tokens``, the prompt's ids;
it is cut into whole pages, and what is left over counts as asked for but cannot be held.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
PAGE_TOKENS = 16
MAX_ID = (1 << 62) - 1
_MAX_LENGTH = 1 << 40


class TraceError(ValueError):
    """A trace that cannot be replayed; the message starts with file and line number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request; its prompt is ``units``.

    Attributes:
        partial: the last unit is not full, so it is held apart from those before it.
        asked: tokens of the prompt, in whole units for Mooncake's format.
    """

    units: array[int]
    output_length: int
    partial: bool
    asked: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of time; every unit stands for ``unit_tokens`` tokens."""

    name: str
    requests: list[Request]
    unit_tokens: int

    @property
    def asked_tokens(self) -> int:
        return sum(request.asked for request in self.requests)


def read_trace(path: str | Path, page_tokens: int = PAGE_TOKENS) -> Trace:
    """The trace in the file ``path``; Mooncake's format or token-level, told apart by the first line.

    Args:
        page_tokens: tokens of a page of a token-level trace.

    Raises:
        OSError: the file cannot be read.
        TraceError: a line is not JSON or lacks a field, a value is out of range, time goes backwards, formats mix, or
            there is no request.
    """
    path = Path(path)
    pages = _Pages(page_tokens)
    parse: Callable[[dict[str, Any]], Request] | None = None
    requests: list[Request] = []
    last_time: float = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = _record(line)
                if parse is None:
                    parse = _parse_blocks if "hash_ids" in record else pages.parse
                time = _number(record, "timestamp")
                if time < last_time:
                    raise TraceError(f"timestamp={time} is before {last_time} of an earlier line; sort by time")
                last_time = time
                requests.append(parse(record))
            except TraceError as error:
                raise TraceError(f"{path}:{number}: {error}") from None
    if not requests:
        raise TraceError(f"{path}:1: the file holds no request")
    return Trace(path.stem, requests, page_tokens if parse == pages.parse else BLOCK_TOKENS)


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        shown = line[-40:].decode("utf-8", "replace").strip()
        raise TraceError(f"not a whole JSON object (it ends with {shown!r})") from None
    if not isinstance(record, dict):
        raise TraceError(f"a request is a JSON object, got {type(record).__name__}")
    return record


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise TraceError(f"field {name!r} is missing; the line has {', '.join(sorted(record)) or 'none'}")
    return record[name]


def _number(record: dict[str, Any], name: str) -> float:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise TraceError(f"{name}={value!r} must be a number, at least 0")
    return value


def _length(record: dict[str, Any], name: str, minimum: int) -> int:
    value = _field(record, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TraceError(f"{name}={value!r} must be a whole number")
    if not minimum <= value <= _MAX_LENGTH:
        raise TraceError(f"{name}={value} must lie in {minimum}..{_MAX_LENGTH}")
    return value


def _ids(record: dict[str, Any], name: str) -> array[int]:
    values = _field(record, name)
    if not isinstance(values, list) or not values:
        raise TraceError(f"{name} must be a list of at least one id, got {str(values)[:40]}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_ID:
            raise TraceError(f"{name} holds {str(value)[:40]}; an id is a whole number in 0..{MAX_ID}")
    return array("q", values)


def _parse_blocks(record: dict[str, Any]) -> Request:
    input_length = _length(record, "input_length", 1)
    output_length = _length(record, "output_length", 0)
    units = _ids(record, "hash_ids")
    expected = -(-input_length // BLOCK_TOKENS)
    if len(units) != expected:
        raise TraceError(
            f"input_length={input_length} makes {expected} blocks of {BLOCK_TOKENS} tokens, hash_ids has {len(units)}"
        )
    return Request(units, output_length, input_length % BLOCK_TOKENS != 0, expected * BLOCK_TOKENS)


class _Pages:
    """Names pages of tokens by number: equal numbers are equal prefixes."""

    def __init__(self, page_tokens: int):
        self._page_tokens = page_tokens
        self._numbers: dict[tuple[int, bytes], int] = {}

    def parse(self, record: dict[str, Any]) -> Request:
        output_length = _length(record, "output_length", 0)
        tokens = _ids(record, "tokens")
        size, units, before = self._page_tokens, array("q"), -1
        for start in range(0, len(tokens) - size + 1, size):
            page = (before, tokens[start : start + size].tobytes())
            before = self._numbers.setdefault(page, len(self._numbers))
            units.append(before)
        return Request(units, output_length, False, len(tokens))
