"""A tree of nodes with its counts and eviction queues: what every change of a node keeps exact."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sglang_plt.keys import Key
from sglang_plt.node import Node
from sglang_plt.policy import EvictionOrder, make_queue
from sglang_plt.probability import Estimator
from sglang_plt.queues import NodeQueue


class NodeTree:
    """Counts, queues and inspection; sizes in tokens.

    Args:
        page_size: tokens of the allocation unit; nodes start and end on page boundaries.
        order: eviction order of the hot tier.
        lower_order: that of the cold and the replay tier; default: the same.

    Attributes:
        on_change: called with a node whose edge or residency has changed, for statistics that follow the trie.
    """

    def __init__(self, page_size: int, order: EvictionOrder, lower_order: EvictionOrder | None = None):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.order = order
        self.lower_order = lower_order or order
        self.on_change: Callable[[Node], None] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything. Handles of earlier nodes are void."""
        self.clock = 0
        self._next_id = 0
        self.hot_queue = make_queue(self.order)
        self.cold_queue = make_queue(self.lower_order)
        self.replay_queue = make_queue(self.lower_order)
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.cold_tokens = 0
        self.replay_tokens = 0
        self.num_nodes = 0
        self.estimator = Estimator()
        self.root = Node(self._new_id(), None, Key(array("q")), 0, 0, -(1 << 62))
        self.root.slots = ()
        self.root.lock_count = 1

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def tick(self) -> int:
        """Advance the logical clock; once per operation."""
        self.clock += 1
        return self.clock

    def _edge(self, node: Node, key: Key, offset: int) -> Any:
        page = key.page_at(offset, self.page_size)
        return (key.namespace, page) if node.parent is None and key.namespace is not None else page

    # -- inspection -----------------------------------------------------------------------------------------------

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root to ``node``."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- what goes first ------------------------------------------------------------------------------------------

    def in_line(self, queue: NodeQueue, amount: int, size: Callable[[Node], int] = len) -> list[Node]:
        """The nodes that would leave the hot or the cold queue one after another, parents behind their children.

        Args:
            amount: what their sizes add up to, at least.
            size: called once for each node, in order.
        """
        return queue.in_line(amount, size, self._follows_hot if queue is self.hot_queue else self._follows_cold)

    def _follows_hot(self, node: Node, gone: int) -> bool:
        return gone == node.hot_children and node.lock_count == 0

    def _follows_cold(self, node: Node, gone: int) -> bool:
        return gone == node.resident_children and node.pin_count == 0 and node.cold

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def _count(self, node: Node, sign: int = 1) -> None:
        tokens = sign * node.key.length
        if node.slots is not None:
            if node.lock_count:
                self.protected_tokens += tokens
            else:
                self.evictable_tokens += tokens
        elif node.views:
            self.cold_tokens += tokens
        else:
            self.replay_tokens += tokens

    def _uncount(self, node: Node) -> None:
        self._count(node, -1)

    def _requeue(self, node: Node) -> None:
        """Put ``node`` into the one queue that its state belongs to, or into none."""
        queue: NodeQueue | None = None
        if node.parent is None:
            return
        if node.slots is not None:
            if node.hot_children == 0 and node.lock_count == 0:
                queue = self.hot_queue
        elif node.views:
            if node.resident_children == 0 and node.pin_count == 0:
                queue = self.cold_queue
        elif not node.children and node.pin_count == 0:  # a removed node would keep its ancestors pinned
            queue = self.replay_queue
        if node.queue is not queue:
            if node.queue is not None:
                node.queue.discard(node)
            if queue is not None:
                queue.add(node)

    def check(self) -> None:
        """Verify every invariant of :mod:`sglang_plt.tiers` and every counter; slow, for tests."""
        from sglang_plt.trie_check import check_trie

        check_trie(self)
