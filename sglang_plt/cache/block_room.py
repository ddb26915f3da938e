"""Blocks for rows that are to be stored: what they refer to, what they take of the budget, and who goes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_plt.blocks import BLOCK_TOKENS, BlockReference, View
from sglang_plt.cache.room import choose_victims
from sglang_plt.cache.sizes import BlockSizes
from sglang_plt.trie import Node

if TYPE_CHECKING:
    from sglang_plt.cache.cold_tier import ColdTier


class BlockRoom:
    """Reserves and frees blocks for the cold tier that owns it.

    Args:
        agree_max, log: as of :class:`sglang_plt.cache.cold_tier.ColdTier`.
    """

    def __init__(self, tier: ColdTier, agree_max: Callable[[list[int]], list[int]], log: Callable[..., None]):
        self._tier = tier
        self.sizes = BlockSizes(tier.codec)
        self._agree_max = agree_max
        self._log = log

    def reserve(self, node: Node, *, last_resort: bool) -> bool:
        """Give a hot node blocks in state QUEUED; False when the store cannot make room.

        ``last_resort`` gives up the copies of other hot nodes too, where all cold nodes are not enough.
        """
        shapes = []
        for start in range(0, len(node), BLOCK_TOKENS):
            rows = min(BLOCK_TOKENS, len(node) - start)
            near = self._find(node, start, rows)
            size = self.sizes(rows, node.start + start, sum(reference.num_rows for reference in near))
            shapes.append((start, rows, size, near))
        store = self._tier.store
        references = [reference for *_, near in shapes for reference in near]
        store.hold(references)
        if not self._make_room(sum(size for _, _, size, _ in shapes), copies=last_resort):
            store.let_go(references)
            return False
        teaches = node.key.namespace is None
        views = [
            store.add(rows, size, node.start + start, node.slots[start : start + rows], teaches, near)
            for start, rows, size, near in shapes
        ]
        self._tier.trie.set_views(node, views)
        if self._finds:
            for (start, rows, _, _), view in zip(shapes, views, strict=True):
                self._tier.near.add(view.block, node, node.key.tokens[start : start + rows])
        self._log("write", node=node.id, tokens=len(node), near=sum(reference.num_rows for reference in references))
        return True

    @property
    def _finds(self) -> bool:
        codec = self._tier.codec
        return self._tier.config.delta and codec is not None and codec.takes_references

    def _find(self, node: Node, start: int, rows: int) -> tuple[BlockReference, ...]:
        if not self._finds:
            return ()
        return self._tier.near.find(node.key.namespace, node.key.tokens[start : start + rows])

    def settle(self, node: Node) -> None:
        """Charge what the blocks of a hot node turned out to need, and make room for it; without room they go."""
        open_blocks = [view.block for view in node.views if not view.block.settled]
        if not open_blocks:
            return
        sizes = [block.num_bytes for block in open_blocks]
        if not self.sizes.exact:
            sizes = self._agree_max([len(block.data) if block.data is not None else 0 for block in open_blocks])
        for block, size in zip(open_blocks, sizes, strict=True):
            self._tier.store.settle(block, size)
            if block.teaches and size:
                near = sum(reference.num_rows for reference in block.references)
                self._tier.stats.near_saved_bytes += self.sizes.learn(block.num_rows, size, near)
        if self._tier.store.free_bytes >= 0:
            return
        self._tier.trie.pin(node)
        enough = self._make_room(0, copies=True)
        self._tier.trie.unpin(node)
        if not enough:
            self._tier.stats.store_full += 1
            self._tier.store.release(self._tier.trie.clear_views(node))

    def _make_room(self, num_bytes: int, *, copies: bool) -> bool:
        """Free ``num_bytes`` of the store, or nothing; arguments as of :func:`choose_victims`."""
        shortage = num_bytes - self._tier.store.free_bytes
        if shortage <= 0 or num_bytes > self._tier.store.budget_bytes:
            return shortage <= 0
        victims = choose_victims(self._tier.trie, shortage, copies=copies)
        for node in victims:
            if node.hot:
                self._finish_reads(node.views)
                self._tier.store.release(self._tier.trie.clear_views(node))
                self._log("drop_copy", node=node.id, tokens=len(node))
            else:
                self.drop_cold(node)
        return bool(victims)

    def _finish_reads(self, views: list[View]) -> None:
        """Let no block that stays, or that is in work, read slots that its node may lose from now on."""
        for view in views:
            if view.block.refs > 1 or view.block.dependants:
                self._tier.writer.finish(view.block)
            else:
                self._tier.writer.abandon(view.block)

    def drop_cold(self, node: Node) -> None:
        """Take its views from a cold node."""
        self._tier.stats.dropped_tokens["cold"] += len(node)
        self._log("drop_cold", node=node.id, tokens=len(node))
        self._tier.store.release(self._tier.trie.clear_views(node))
