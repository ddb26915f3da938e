"""What the cache counts; plain numbers here, exported by :mod:`sglang_plt.cache.metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

TIMED = ("encode", "decode", "evict", "restore", "align")
"""What is timed: encoding and decoding of rows; what an eviction or a restore adds to a scheduling step; the search for
what a block resembles."""


@dataclass
class CacheStats:
    """Totals since the start of the process. ``observer`` receives every ``(what, seconds)`` as well."""

    matched_hot_tokens: int = 0
    matched_cold_tokens: int = 0
    demoted_tokens: int = 0
    restored_tokens: int = 0
    restores: int = 0
    restore_failures: int = 0
    encode_failures: int = 0
    store_full: int = 0
    blocks_written_ahead: int = 0
    blocks_written_late: int = 0
    encoded_bytes: int = 0
    decoded_bytes: int = 0
    near_candidates: int = 0
    near_accepted: int = 0
    near_saved_bytes: int = 0
    dropped_tokens: dict[str, int] = field(default_factory=lambda: {"hot": 0, "cold": 0, "replay": 0})
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMED, 0.0))
    observer: Callable[[str, float], None] | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def observe(self, what: str, seconds: float, num_bytes: int = 0) -> None:
        """Record one timed event of :data:`TIMED`; the block writer calls it from its own thread."""
        with self._lock:
            self.seconds[what] += seconds
            if what == "encode":
                self.encoded_bytes += num_bytes
        if self.observer is not None:
            self.observer(what, seconds)
