"""Which node goes first: SGLang's eviction orders over logical clocks, and a queue that follows them lazily.

An order maps a node to a key; the smallest goes first. The orders are those of SGLang 0.5.23
(``srt/mem_cache/evict_policy.py``), except ``tlru``, which SGLang itself ties to its unified tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_plt.value import ValueOrder

if TYPE_CHECKING:
    from sglang_plt.node import Node

EvictionOrder = Callable[["Node"], Any]


def _slru(node: Node, protected_threshold: int) -> tuple[int, int]:
    return (int(node.hit_count >= protected_threshold), node.last_access)


_ORDERS: dict[str, EvictionOrder] = {
    "lru": lambda node: node.last_access,
    "lfu": lambda node: (node.hit_count, node.last_access),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.last_access,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority, node.last_access),
    "slru": lambda node: _slru(node, 2),
}

EVICTION_POLICIES = tuple(_ORDERS)
"""SGLang's own."""

PLT_POLICIES = (*EVICTION_POLICIES, "value")


def make_order(name: str, options: dict[str, Any] | None = None) -> EvictionOrder:
    """The order called ``name``, one of :data:`PLT_POLICIES`; ``value`` is a :class:`sglang_plt.value.ValueOrder`.

    Args:
        options: keyword arguments of the policy; only ``slru`` has one, ``protected_threshold``.

    Raises:
        ValueError: unknown name or option.
    """
    name = name.lower()
    if name == "value" and not options:
        return ValueOrder()
    if name not in _ORDERS:
        raise ValueError(f"eviction policy {name!r} is not supported; choose one of {', '.join(PLT_POLICIES)}")
    if not options:
        return _ORDERS[name]
    threshold = options.get("protected_threshold")
    if name != "slru" or set(options) != {"protected_threshold"} or not isinstance(threshold, int):
        raise ValueError(f"eviction policy {name!r} does not take the options {options!r}")
    return lambda node: _slru(node, threshold)


class EvictionQueue:
    """Nodes ordered by an :data:`EvictionOrder`, cheap to update: an update pushes, stale entries are skipped.

    A node is in at most one queue at a time; ``node.queue`` names it and ``node.queue_stamp`` marks its live entry.
    An order whose keys change while a node waits makes its own queue, which is then what this constructor returns.
    """

    _SLACK = 64

    def __new__(cls, order: EvictionOrder) -> Any:
        make_queue = getattr(order, "make_queue", None)
        return make_queue() if make_queue is not None else super().__new__(cls)

    def __init__(self, order: EvictionOrder):
        self.order = order
        self._heap: list[tuple[Any, int, int, Node]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def add(self, node: Node) -> None:
        """Add ``node``, or move it to where its present statistics put it."""
        if node.queue is None:
            node.queue = self
            self._live += 1
        node.queue_stamp += 1
        heapq.heappush(self._heap, (self.order(node), node.id, node.queue_stamp, node))
        if len(self._heap) > 4 * self._live + self._SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take ``node`` out; it must be in this queue."""
        assert node.queue is self
        node.queue = None
        node.queue_stamp += 1
        self._live -= 1

    def peek(self) -> Node | None:
        """The node that goes first, or None when the queue is empty."""
        heap = self._heap
        while heap:
            _, _, stamp, node = heap[0]
            if node.queue is self and node.queue_stamp == stamp:
                return node
            heapq.heappop(heap)
        return None

    def frontier(self, tokens: int) -> list[Node]:
        """The nodes that go first, until they hold at least ``tokens`` tokens; the queue stays as it is."""
        heap = self._heap
        entries: list[tuple[Any, int, int, Node]] = []
        while heap and tokens > 0:
            entry = heapq.heappop(heap)
            if self._is_live(entry):
                entries.append(entry)
                tokens -= len(entry[3])
        for entry in entries:
            heapq.heappush(heap, entry)
        return [entry[3] for entry in entries]

    def _is_live(self, entry: tuple[Any, int, int, Node]) -> bool:
        _, _, stamp, node = entry
        return node.queue is self and node.queue_stamp == stamp
