"""What eviction queues have in common: which nodes are in one, and what would leave it."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_plt.node import Node


class NodeQueue(ABC):
    """Nodes, those that go first in front.

    A node is in at most one queue at a time: ``node.queue`` names it. ``node.queue_stamp`` marks its live entry: an
    update only pushes another one, and entries that are out of date are skipped.
    """

    _SLACK = 64  # entries out of date that are worth no clean-up

    def __init__(self) -> None:
        self._live = 0
        self._rehearsing = False
        self._aside: list[tuple[list[Any], Any]] = []  # (heap, entry) to push back when the rehearsal ends

    def __len__(self) -> int:
        return self._live

    def add(self, node: Node) -> None:
        """Add ``node``, or move it to where its present statistics put it."""
        if node.queue is None:
            node.queue = self
            self._live += 1
        node.queue_stamp += 1
        self._push(node)
        if not self._rehearsing and self._is_untidy():
            self._tidy()

    def discard(self, node: Node) -> None:
        """Take ``node`` out; it must be in this queue."""
        assert node.queue is self
        node.queue = None
        node.queue_stamp += 1
        self._live -= 1

    @abstractmethod
    def peek(self) -> Node | None:
        """The node that goes first, or None when the queue is empty."""

    def in_line(self, amount: int, size: Callable[[Node], int], follows: Callable[[Node, int], bool]) -> list[Node]:
        """The nodes that would leave one after another, until their sizes add up to at least ``amount``.

        The queue stays as it is.

        Args:
            size: called once for each node, in order.
            follows: whether the first node enters the queue once so many of its children have left.
        """
        left: list[Node] = []
        entered: dict[int, Node] = {}
        gone: dict[int, int] = {}  # children that have left
        self.peek()
        self._rehearsing = True
        undo = self._snapshot()
        while amount > 0 and (node := self.peek()) is not None:
            node.queue = None  # its stamp stays: the entry is set aside when it is met, not dropped
            self._live -= 1
            left.append(node)
            amount -= size(node)
            parent = node.parent
            assert parent is not None
            count = gone[parent.id] = gone.get(parent.id, 0) + 1
            if follows(parent, count):
                self.add(parent)
                entered[parent.id] = parent
        for node in entered.values():
            if node.queue is self:
                self.discard(node)
            else:
                node.queue_stamp += 1
        for node in left:
            if node.id not in entered:
                node.queue = self
                self._live += 1
        for heap, entry in self._aside:
            heapq.heappush(heap, entry)
        self._aside.clear()
        undo()
        self._rehearsing = False
        return left

    def _is_live(self, node: Node, stamp: int) -> bool:
        return node.queue is self and node.queue_stamp == stamp

    def _skip(self, heap: list[Any], node: Node, stamp: int) -> None:
        """Pop the first entry of ``heap``, which is not live."""
        entry = heapq.heappop(heap)
        if node.queue is None and node.queue_stamp == stamp:
            self._aside.append((heap, entry))

    @abstractmethod
    def _push(self, node: Node) -> None: ...

    @abstractmethod
    def _is_untidy(self) -> bool:
        """Whether most entries are out of date."""

    @abstractmethod
    def _tidy(self) -> None:
        """Drop what is out of date."""

    def _snapshot(self) -> Callable[[], None]:
        """Returns what undoes the changes of a rehearsal, but for the entries that it set aside."""
        return lambda: None
