"""Rows of a payload on their way into the pool, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

Write = Callable[[int, int], None]
"""``write(first, stop)`` writes the layers ``first .. stop``; the first ones first, and none twice."""


class LayerWriter:
    """Writes the layers of a payload in order, as far as it is asked to. Everything in the payload has been checked.

    What can still fail is the machine, by running out of memory for one. A writer belongs to one thread at a time.

    Args:
        write: does it; dropped, and with it what it holds, when the last layer is written.
    """

    def __init__(self, num_layers: int, write: Write) -> None:
        self.num_layers = num_layers
        self.written = 0
        self._write: Write | None = write

    def write_to(self, stop: int) -> None:
        """Write the layers below ``stop`` that are not written yet; all of them where there are no more."""
        stop = min(stop, self.num_layers)
        if self._write is None or stop <= self.written:
            return
        self._write(self.written, stop)
        self.written = stop
        if stop == self.num_layers:
            self._write = None

    def write_all(self) -> None:
        """Write every layer that is not written yet."""
        self.write_to(self.num_layers)
