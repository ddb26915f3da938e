"""Which node goes first: SGLang's eviction orders over logical clocks, and a queue that follows them lazily.

An order maps a node to a key; the smallest goes first. The orders are those of SGLang 0.5.23
(``srt/mem_cache/evict_policy.py``), except ``tlru``, which SGLang itself ties to its unified tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_plt.config import POLICIES
from sglang_plt.queues import NodeQueue
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


def make_order(name: str, options: dict[str, Any] | None = None) -> EvictionOrder:
    """The order called ``name``; ``value`` is a :class:`sglang_plt.value.ValueOrder`.

    Args:
        name: one of :data:`sglang_plt.config.POLICIES`.
        options: keyword arguments of the policy; only ``slru`` has one, ``protected_threshold``.

    Raises:
        ValueError: unknown name or option.
    """
    if name not in POLICIES:
        raise ValueError(f"eviction policy {name!r} is not supported; choose one of {', '.join(POLICIES)}")
    if not options:
        return ValueOrder() if name == "value" else _ORDERS[name]
    threshold = options.get("protected_threshold")
    if name != "slru" or set(options) != {"protected_threshold"} or not isinstance(threshold, int):
        raise ValueError(f"eviction policy {name!r} does not take the options {options!r}")
    return lambda node: _slru(node, threshold)


def make_queue(order: EvictionOrder) -> NodeQueue:
    """An empty queue of ``order``; an order whose keys change while a node waits makes its own."""
    make = getattr(order, "make_queue", None)
    return make() if make is not None else EvictionQueue(order)


class EvictionQueue(NodeQueue):
    """A heap of ``(order(node), id, stamp, node)``."""

    def __init__(self, order: EvictionOrder):
        super().__init__()
        self.order = order
        self._heap: list[tuple[Any, int, int, Node]] = []

    def peek(self) -> Node | None:
        heap = self._heap
        while heap:
            _, _, stamp, node = heap[0]
            if self._is_live(node, stamp):
                return node
            self._skip(heap, node, stamp)
        return None

    def _push(self, node: Node) -> None:
        heapq.heappush(self._heap, (self.order(node), node.id, node.queue_stamp, node))

    def _is_untidy(self) -> bool:
        return len(self._heap) > 4 * self._live + self._SLACK

    def _tidy(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_live(entry[3], entry[2])]
        heapq.heapify(self._heap)
