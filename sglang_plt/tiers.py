"""The tiers of a trie's nodes: who is hot, cold or replay, what is locked or pinned, and what goes first.

Every change of a node's state passes through here, so that token counts and eviction queues are always exact. A node is
*hot* (it owns device slots), *cold* (it owns views of encoded blocks and no slots), or *replay* (tokens only, kept for
its statistics). A hot node may own views too: then evicting it costs nothing. Invariants, kept by construction and
checked by :meth:`TieredNodes.check`:

- the parent of a hot node is hot; the parent of a cold node is hot or cold (a restore needs the whole prefix);
- views, where a node has any, cover exactly its tokens;
- a locked node is hot and so are its ancestors; ``lock_count`` never grows downwards.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sglang_plt.blocks import View
from sglang_plt.keys import Key
from sglang_plt.node import Node
from sglang_plt.policy import EvictionOrder, EvictionQueue
from sglang_plt.probability import Estimator


class TieredNodes:
    """A tree of :class:`Node` with token counts, eviction queues, locks and pins; sizes in tokens.

    Args:
        page_size: tokens of the allocation unit; nodes start and end on page boundaries.
        order: eviction order of the hot tier; the cold and replay tiers use the same.

    Attributes:
        on_change: called with a node whose edge or residency has changed, for statistics that follow the trie.
    """

    def __init__(self, page_size: int, order: EvictionOrder):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.order = order
        self.on_change: Callable[[Node], None] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything. Handles of earlier nodes are void."""
        self.clock = 0
        self._next_id = 0
        self.hot_queue = EvictionQueue(self.order)
        self.cold_queue = EvictionQueue(self.order)
        self.replay_queue = EvictionQueue(self.order)
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

    # -- tiers ----------------------------------------------------------------------------------------------------

    def set_hot(self, node: Node, slots: Any, *, lossy: bool) -> None:
        """Give a cold or replay node device slots (its parent must be hot)."""
        assert node.slots is None
        assert len(slots) == len(node.key), (len(slots), len(node.key))
        parent = node.parent
        assert parent is not None
        assert parent.slots is not None
        self._uncount(node)
        if not node.views:
            parent.resident_children += 1
        parent.hot_children += 1
        node.slots = slots
        node.lossy = lossy
        self._count(node)
        self._requeue(parent)
        self._requeue(node)
        if self.on_change is not None:
            self.on_change(node)

    def clear_hot(self, node: Node) -> Any:
        """Take the device slots from an unlocked node without hot children; returns them."""
        assert node.slots is not None
        assert node.lock_count == 0
        assert node.hot_children == 0
        assert node.views or node.resident_children == 0, "drop the cold subtree first"
        parent = node.parent
        assert parent is not None
        self._uncount(node)
        slots, node.slots, node.lossy = node.slots, None, False
        parent.hot_children -= 1
        if not node.views:
            parent.resident_children -= 1
        self._count(node)
        self._requeue(node)
        self._requeue(parent)
        if self.on_change is not None:
            self.on_change(node)
        return slots

    def set_views(self, node: Node, views: list[View]) -> None:
        """Give a hot node the views of its encoded rows."""
        assert node.slots is not None
        assert not node.views
        assert sum(len(view) for view in views) == len(node.key)
        node.views = views

    def clear_views(self, node: Node) -> list[View]:
        """Take the views from a node; the caller releases their blocks. A cold node must have no resident children."""
        assert node.views
        assert node.slots is not None or node.resident_children == 0
        self._uncount(node)
        views, node.views = node.views, []
        if node.slots is None:
            assert node.parent is not None
            node.parent.resident_children -= 1
        self._count(node)
        self._requeue(node)
        if node.parent is not None:
            self._requeue(node.parent)
        if self.on_change is not None:
            self.on_change(node)
        return views

    def remove(self, node: Node) -> None:
        """Delete a replay node without children."""
        parent = node.parent
        assert parent is not None
        assert not node.resident
        assert not node.children
        if node.queue is not None:
            node.queue.discard(node)
        del parent.children[self._edge(parent, node.key, 0)]
        self.replay_tokens -= len(node)
        self.num_nodes -= 1
        if parent is self.root:
            self.estimator.forget(node)
        if self.on_change is not None:
            self.on_change(node)
        node.parent = None
        self._requeue(parent)

    # -- locks and pins -------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """Protect the slots of ``node`` and its ancestors; returns the tokens that became protected."""
        locked = 0
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            if walk.lock_count == 0:
                assert walk.slots is not None, f"cannot lock {walk}"
                locked += len(walk.key)
                walk.lock_count = 1
                if walk.queue is not None:
                    walk.queue.discard(walk)
            else:
                walk.lock_count += 1
            walk = walk.parent
        assert walk is self.root, "the node is of another tree"
        self.evictable_tokens -= locked
        self.protected_tokens += locked
        return locked

    def unlock(self, node: Node) -> int:
        """Undo one :meth:`lock`; returns the tokens that became evictable."""
        freed = 0
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            assert walk.lock_count > 0, f"unlock of an unlocked {walk}"
            walk.lock_count -= 1
            if walk.lock_count == 0:
                freed += len(walk.key)
                if walk.hot_children == 0:
                    self._requeue(walk)
            walk = walk.parent
        assert walk is self.root, "the node is of another tree"
        self.evictable_tokens += freed
        self.protected_tokens -= freed
        return freed

    def pin(self, node: Node) -> None:
        """Keep the views of ``node`` and its ancestors from being dropped."""
        walk: Node | None = node
        while walk is not None:
            walk.pin_count += 1
            if walk.queue is self.cold_queue:
                walk.queue.discard(walk)
            walk = walk.parent

    def unpin(self, node: Node) -> None:
        """Undo one :meth:`pin`."""
        walk: Node | None = node
        while walk is not None:
            assert walk.pin_count > 0
            walk.pin_count -= 1
            if walk.pin_count == 0:
                self._requeue(walk)
            walk = walk.parent

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
        queue: EvictionQueue | None = None
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
        """Verify every invariant of the module docstring and every counter; slow, for tests."""
        from sglang_plt.trie_check import check_trie

        check_trie(self)
