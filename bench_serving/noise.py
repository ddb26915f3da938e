"""Whether something else used the machine while it was measured."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROBE_LIMIT = 1.10
"""A probe that takes so many times as long as the fastest of the run marks its server as disturbed."""
OTHERS_LIMIT = 0.10
"""So does this share of the cores' time going to processes that are not measured."""

_PROBE_BYTES = 8 << 20
_PROBE_TIMES = 32
_PROBE_ROUNDS = 5


def probe(num_bytes: int = _PROBE_BYTES) -> float:
    """Seconds for a fixed piece of work on all cores at once (SHA-256); the median of five."""
    block = bytes(num_bytes)
    times = []
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(_PROBE_ROUNDS):
            started = time.perf_counter()
            list(pool.map(_hash, [block] * cores))
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _hash(block: bytes) -> None:
    digest = hashlib.sha256()
    for _ in range(_PROBE_TIMES):
        digest.update(block)


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


class Others:
    """CPU time of processes that are not measured, from here on.

    Args:
        members: gives the ids of the processes that are; this one is as well.
    """

    def __init__(self, members: Callable[[], list[int]]):
        self._members = members
        self._started = time.monotonic()
        self._before = self._used()

    def share(self) -> float | None:
        """Their share of the time of all cores since this object was made.

        None where the kernel counts other cores than this process may use, as in some containers. Measured processes
        must not have ended.
        """
        after = self._used()
        if self._before is None or after is None:
            return None
        seconds = (after - self._before) / os.sysconf("SC_CLK_TCK")
        elapsed = time.monotonic() - self._started
        return max(0.0, seconds / max(1e-9, elapsed * len(os.sched_getaffinity(0))))

    def _used(self) -> float | None:
        """Ticks of everybody but the measured."""
        lines = Path("/proc/stat").read_text().splitlines()
        if sum(line.startswith("cpu") for line in lines) - 1 != len(os.sched_getaffinity(0)):
            return None
        user, nice, system, _, _, irq, soft, steal = map(int, lines[0].split()[1:9])
        mine = 0
        for pid in {os.getpid(), *self._members()}:
            with contextlib.suppress(OSError):
                # after "pid (comm)": state is field 0, utime, stime, cutime and cstime are 11 to 14
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                mine += sum(map(int, fields[11 : 13 if pid == os.getpid() else 15]))
        return user + nice + system + irq + soft + steal - mine
