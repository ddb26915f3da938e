"""Block sizes of kernels: the default at once, or what was measured to be best on this GPU, from a file.

:func:`chosen` never measures: it reads the file once in a process, so a server start waits for nothing. :func:`tune`
measures, when asked to, and writes the file. It is JSON, ``{"format": 1, "triton": version, "devices": {name: {kernel:
{shape: fields of the choice}}}}``; a file that is damaged or of another triton, and a choice that is none of the
candidates, are as if they were not there.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton

FORMAT = 1
T = TypeVar("T")
_forced: dict[str, Any] = {}


def cache_file() -> Path:
    """``$TRITON_OPS_TUNED``, or ``triton_ops/tuned.json`` in the user's cache."""
    named = os.environ.get("TRITON_OPS_TUNED")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "triton_ops" / "tuned.json"


def device_name(device: torch.device) -> str:
    """By which choices are kept; empty on a CPU, which has none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def chosen(kernel: str, shape: str, candidates: Sequence[T], device: str) -> T:
    """The block sizes to launch a kernel with.

    Args:
        shape: what the kernel is compiled for, in words.
        candidates: dataclasses of numbers, all of them right; the first is the default.
        device: :func:`device_name`.
    """
    if kernel in _forced:
        return _forced[kernel]
    if not device:
        return candidates[0]
    stored = _read(cache_file())["devices"].get(device, {}).get(kernel, {}).get(shape)
    if stored is None:
        return candidates[0]
    for candidate in candidates:
        if asdict(candidate) == stored:  # type: ignore[call-overload]
            return candidate
    _warn(f"{cache_file()}: {stored} is no choice of {kernel} for {shape}")
    return candidates[0]


def tune(
    kernel: str, shape: str, candidates: Sequence[T], device: str, seconds: Callable[[], float]
) -> tuple[T, list[float | None]]:
    """Measure every candidate and keep the best in the file.

    Args:
        kernel, shape, candidates, device: as :func:`chosen` gets them.
        seconds: launches the kernel and says how long it took.

    Returns:
        The best, and the time of each; None where a candidate does not run, as with too little shared memory.

    Raises:
        RuntimeError: none of them runs.
    """
    times: list[float | None] = []
    for candidate in candidates:
        _forced[kernel] = candidate
        try:
            times.append(seconds())
        except (RuntimeError, triton.TritonError):
            times.append(None)
        finally:
            del _forced[kernel]
    ran = [(time, number) for number, time in enumerate(times) if time is not None]
    if not ran:
        raise RuntimeError(f"triton_ops: no candidate of {kernel} for {shape} runs on {device}")
    best = candidates[min(ran)[1]]
    _write(device, kernel, shape, asdict(best))  # type: ignore[call-overload]
    return best, times


def _write(device: str, kernel: str, shape: str, choice: dict[str, Any]) -> None:
    file = cache_file()
    _read.cache_clear()
    content = _read(file)
    content["devices"].setdefault(device, {}).setdefault(kernel, {})[shape] = choice
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(file)
    _read.cache_clear()


@lru_cache(maxsize=4)
def _read(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"format": FORMAT, "triton": triton.__version__, "devices": {}}
    if not file.exists():
        return empty
    content: Any = None
    with suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not _is_sound(content):
        _warn(f"{file} is damaged")
        return empty
    if (content["format"], content["triton"]) != (FORMAT, triton.__version__):
        _warn(f"{file} is of format {content['format']} and triton {content['triton']}")
        return empty
    found: dict[str, Any] = content
    return found


def _is_sound(content: Any) -> bool:
    if not isinstance(content, dict) or set(content) != {"format", "triton", "devices"}:
        return False
    levels = [content["devices"]]
    for _ in range(3):  # devices, kernels, shapes
        if not all(isinstance(level, dict) for level in levels):
            return False
        levels = [inner for level in levels for inner in level.values()]
    return all(isinstance(choice, dict) for choice in levels)


@lru_cache(maxsize=256)
def _warn(problem: str) -> None:
    warnings.warn(f"triton_ops: {problem}; default block sizes are used instead", stacklevel=4)
