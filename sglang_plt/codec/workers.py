"""Blocks side by side on the cores of a CPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

Call = Callable[[], None]
_NICE = 10  # a tenth of a core where all others are busy

Run = Callable[[Sequence[Call]], list[Exception | None]]
"""Runs calls, in any order and on any threads; returns what each raised."""


def in_turn(calls: Sequence[Call]) -> list[Exception | None]:
    """Run all ``calls``; what each raised."""
    return [_outcome(call) for call in calls]


class Workers:
    """Threads that run one call each, with one torch thread of their own.

    Args:
        number: of threads; 1 runs everything in the caller's.
    """

    def __init__(self, number: int):
        self._pool = ThreadPoolExecutor(number, "plt-worker", _alone) if number > 1 else None

    @classmethod
    def of_device(cls, device: str | torch.device) -> Workers:
        """As many as torch has threads for a pool on the CPU, one elsewhere."""
        return cls(torch.get_num_threads() if torch.device(device).type == "cpu" else 1)

    def __call__(self, calls: Sequence[Call]) -> list[Exception | None]:
        """Run all ``calls``; what each raised."""
        if self._pool is None or len(calls) < 2:
            return in_turn(calls)
        return list(self._pool.map(_outcome, calls))


def stand_back() -> None:
    """Make the calling thread give way to the others: torch on one core, and a low priority where threads have one."""
    _alone()
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _alone() -> None:
    torch.set_num_threads(1)  # of this thread: OpenMP teams of several threads would spin against each other


def _outcome(call: Call) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None
