"""From a promised host hit to device slots: what is pinned between match and restore, and all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_plt.cache.cold_tier import ColdTier
from sglang_plt.node import Node
from sglang_plt.trie import Trie


class LoadBack:
    """Brings runs of cold nodes back to the device.

    The scheduler matches a request and asks for its restore before it matches the next one, so one pin is enough.

    Args:
        allocate: takes so many slots, evicting where it must; None when there are not enough.
        free: gives slots back that were not used.
    """

    def __init__(self, trie: Trie, cold: ColdTier, allocate: Callable[[int], Any | None], free: Callable[[Any], None]):
        self._trie = trie
        self._cold = cold
        self._allocate = allocate
        self._free = free
        self._pinned: Node | None = None

    def clear(self) -> None:
        """Forget the pin of a trie that is about to be cleared."""
        self._pinned = None

    def pin(self, last: Node) -> None:
        """Keep what was promised up to ``last`` until the next :meth:`unpin` or :meth:`restore`."""
        self.unpin()
        self._trie.pin(last)
        self._pinned = last

    def unpin(self) -> None:
        """Give up the promise of the last match."""
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            self._trie.unpin(pinned)

    def last_hot(self, node: Node) -> Node:
        """The deepest hot node on the path to ``node``; the root where ``node`` has left the trie."""
        walk: Node | None = node
        while walk is not None and not walk.hot:
            walk = walk.parent
        return self._trie.root if walk is None else walk

    def restore(self, last: Node, num_tokens: int) -> list[Node]:
        """Restore the ``num_tokens`` cold tokens that end at ``last``.

        Returns:
            The nodes that are hot now, top first; empty when nothing was restored: the path is no longer what was
            promised, there are no slots, or a block cannot be decoded.
        """
        nodes = self._cold_run(last)
        if not nodes or sum(len(node) for node in nodes) != num_tokens:
            self.unpin()
            return []
        hot = nodes[0].parent
        assert hot is not None
        self._trie.pin(last)
        self._trie.lock(hot)  # the allocation may evict
        try:
            slots = self._allocate(num_tokens)
            restored = slots is not None and self._cold.restore(nodes, slots)
            if slots is not None and not restored:
                self._free(slots)
        finally:
            self._trie.unlock(hot)
            self._trie.unpin(last)
            self.unpin()
        return nodes if restored else []

    @staticmethod
    def _cold_run(last: Node) -> list[Node]:
        """The cold nodes that end at ``last``, top first; empty when the path is no longer whole."""
        nodes: list[Node] = []
        node: Node | None = last
        while node is not None and node.cold:
            nodes.append(node)
            node = node.parent
        if node is None or not node.hot:
            return []
        nodes.reverse()
        return nodes
