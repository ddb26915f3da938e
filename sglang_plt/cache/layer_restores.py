"""Restores that go on while the forward pass runs: a layer is decoded on a side stream while the pass is one below.

A restore can fail as a whole until its nodes become hot. So every block is checked and its entropy code decoded before,
and the first layer of every block is written before too: what a layer needs of memory has been had once. From then on
only the machine can fail, as it can in the pass itself, and with the same end: the pass is stopped by an exception, no
unwritten row is handed out, and the server goes down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sglang_plt.codec.layers import LayerWriter
from sglang_plt.codec.workers import Call, in_turn
from sglang_plt.node import Node

AHEAD = 1
"""Layers that are handed to the side stream ahead of the one that the forward pass asks for."""


class SideStream(Protocol):
    """A stream of the pool's device beside those of the scheduler and of the forward pass."""

    def started(self) -> AbstractContextManager[None]:
        """Make it the current stream, behind all that the current one was given."""

    def resumed(self) -> AbstractContextManager[None]:
        """Make it the current stream, behind its own work alone."""

    def keep(self, slots: Any) -> None:
        """Do not let the memory of ``slots`` be used again before the stream is done with what it was given by then."""

    def record(self) -> Any:
        """An event that happens when the stream is done with what it was given so far."""

    def wait(self, event: Any) -> None:
        """Let the current stream go on only behind ``event``."""


class _Group:
    """Restores that one forward pass waits for; ``events[l]`` happens when layer ``l`` of all of them is written."""

    def __init__(self) -> None:
        self.paths: list[tuple[Node, int]] = []  # last node of a restore, and the position that it begins at
        self.writers: list[LayerWriter] = []
        self.events: list[Any] = []

    def holds(self, node: Node) -> bool:
        """Whether ``node``, or what it was split from, is being restored; walks up, since nodes split meanwhile."""
        for last, start in self.paths:
            walk: Node | None = last
            while walk is not None and walk.stop > start:
                if walk is node:
                    return True
                walk = walk.parent
        return False


class LayerRestores:
    """What the cold tier restores with, and what the KV pool waits for (SGLang's layer transfer counter).

    All methods are called by the scheduler's thread. It decodes a layer in :meth:`wait_until`, where the forward pass
    has just been given the layer below; what the device does of it then runs beside that layer.

    Args:
        num_layers: of the pool.
        begin: ``begin(data, start, stop, slots, position, references=(), tokens=None)`` checks a block and returns its
            writer.
    """

    def __init__(self, num_layers: int, begin: Callable[..., LayerWriter], stream: SideStream):
        self.num_layers = num_layers
        self.consumer_index = -1
        self._begin, self._stream = begin, stream
        self._opened: list[LayerWriter] = []
        self._pending: _Group | None = None
        self._given: dict[int, _Group] = {}
        self._last_index = -1

    @property
    def in_flight(self) -> int:
        """Blocks with layers that are not yet handed to the side stream."""
        groups = [*self._given.values(), *([self._pending] if self._pending is not None else [])]
        return sum(len(group.writers) for group in groups)

    # -- one restore ----------------------------------------------------------------------------------------------

    def run(self, calls: Sequence[Call]) -> list[Exception | None]:
        """Run ``calls`` of :meth:`decode` in turn, on the side stream; what each raised."""
        self._opened = []
        with self._stream.started():
            return in_turn(calls)

    def decode(self, data: Any, start: int, stop: int, slots: Any, position: int, **given: Any) -> None:
        """Check a block and write the first layer of its rows ``start .. stop``; within :meth:`run` only."""
        self._stream.keep(slots)
        writer = self._begin(data, start, stop, slots, position, **given)
        writer.write_to(1)
        self._opened.append(writer)

    def commit(self, nodes: Sequence[Node]) -> None:
        """What the last :meth:`run` began are the rows of ``nodes``, a run of hot ones; the next batch waits for it."""
        if self._pending is None:
            self._pending = _Group()
        self._pending.paths.append((nodes[-1], nodes[0].start))
        self._pending.writers += self._opened
        self._opened = []

    def abandon(self) -> None:
        """Forget what the last :meth:`run` began; its slots may be given away when this returns."""
        self._opened = []
        self._stream.wait(self._stream.record())

    # -- the forward pass -----------------------------------------------------------------------------------------

    def ready(self) -> int:
        """Number of what the next batch must wait for, -1 where there is nothing; called as that batch is made."""
        if self._pending is None:
            return -1
        self._last_index += 1
        self._given[self._last_index], self._pending = self._pending, None
        return self._last_index

    def set_consumer(self, index: int) -> None:
        """The forward pass of the batch with this number begins, of one without at -1.

        What the last pass did not wait for to the end is finished first, so everything after it is in order.
        """
        for number in list(self._given):
            if number != index or number == self.consumer_index:
                self._finish(self._given.pop(number))
        self.consumer_index = index if index in self._given else -1

    def wait_until(self, layer: int) -> None:
        """Let the current stream wait for ``layer``, counted from the pool's first, then decode the one above.

        Raises:
            RuntimeError: it could not be written; the pass must not go on.
        """
        group = self._given.get(self.consumer_index)
        if group is None:
            return
        self._advance(group, layer + 1)
        self._stream.wait(group.events[layer])
        self._advance(group, layer + 1 + AHEAD)

    # -- order ----------------------------------------------------------------------------------------------------

    def settle(self, node: Node) -> None:
        """Finish the restore that ``node`` is of, if any: its slots are about to be given away."""
        if self._pending is not None and self._pending.holds(node):
            pending, self._pending = self._pending, None
            self._finish(pending)
        for number, group in list(self._given.items()):
            if group.holds(node):
                self._finish(self._given.pop(number))

    def cancel(self) -> None:
        """Give up everything in flight; all slots may be given away when this returns."""
        if self._pending is not None or self._given:
            self._pending = None
            self._given.clear()
            self.abandon()
        self.consumer_index = -1

    def _finish(self, group: _Group) -> None:
        self._advance(group, self.num_layers)
        self._stream.wait(group.events[-1])

    def _advance(self, group: _Group, stop: int) -> None:
        stop = min(stop, self.num_layers)
        if len(group.events) >= stop:
            return
        with self._stream.resumed():
            while (layer := len(group.events)) < stop:
                try:
                    for writer in group.writers:
                        writer.write_to(layer + 1)
                except Exception as error:
                    raise RuntimeError(
                        f"PLT cache: layer {layer} of a restore cannot be written, and the forward pass has begun: "
                        f"{type(error).__name__}: {error}; start without --plt-layerwise-restore"
                    ) from error
                group.events.append(self._stream.record())
        if stop == self.num_layers:
            group.writers.clear()
            group.paths.clear()
