"""The tiers of a trie's nodes: who is hot, cold or replay, and what is locked or pinned.

Every change of a node's state passes through here, so that token counts and eviction queues are always exact. A node is
*hot* (it owns device slots), *cold* (it owns views of encoded blocks and no slots), or *replay* (tokens only, kept for
its statistics). A hot node may own views too: then evicting it costs nothing. Invariants, kept by construction and
checked by :meth:`NodeTree.check`:

- the parent of a hot node is hot; the parent of a cold node is hot or cold (a restore needs the whole prefix);
- views, where a node has any, cover exactly its tokens;
- a locked node is hot and so are its ancestors; ``lock_count`` never grows downwards.
"""

from __future__ import annotations

from typing import Any

from sglang_plt.blocks import View
from sglang_plt.node import Node
from sglang_plt.node_tree import NodeTree


class TieredNodes(NodeTree):
    """A :class:`NodeTree` whose nodes change their state; arguments and attributes as there."""

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
