"""Blocks for rows that are to be stored: what they refer to, what they take of the budget, and who goes for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_plt.blocks import BLOCK_TOKENS, BlockReference, View
from sglang_plt.cache.room import choose_victims
from sglang_plt.cache.sizes import BlockSizes
from sglang_plt.keys import is_near_miss
from sglang_plt.trie import Node

if TYPE_CHECKING:
    from sglang_plt.cache.cold_tier import ColdTier


@dataclass(frozen=True)
class _Plan:
    """A block to come: ``rows`` rows from row ``start`` of a node on, and what they resemble."""

    start: int
    rows: int
    near: tuple[BlockReference, ...] = ()

    @property
    def num_near(self) -> int:
        return sum(reference.num_rows for reference in self.near)

    def tokens(self, node: Node) -> array:
        return node.key.tokens[self.start : self.start + self.rows]

    def view(self, node: Node) -> memoryview:
        """The same without a copy."""
        return memoryview(node.key.tokens)[self.start : self.start + self.rows]


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

        ``last_resort`` gives up the copies of other hot nodes too, where all cold nodes are not enough, and in the end
        what the blocks could refer to: it may hold the very bytes that they need.
        """
        plans = [_Plan(start, min(BLOCK_TOKENS, len(node) - start)) for start in range(0, len(node), BLOCK_TOKENS)]
        if self._finds:
            plans = [replace(plan, near=self._find(node, plan)) for plan in plans]
        references = [reference for plan in plans for reference in plan.near]
        store = self._tier.store
        store.hold(references)
        sizes = self._sizes_of(node, plans)
        if not self._make_room(sum(sizes), copies=last_resort):
            store.let_go(references)
            if not (references and last_resort):
                return False
            plans = [replace(plan, near=()) for plan in plans]
            sizes = self._sizes_of(node, plans)
            if not self._make_room(sum(sizes), copies=True):
                return False
        teaches = node.key.namespace is None
        views = []
        for plan, size in zip(plans, sizes, strict=True):
            slots = node.slots[plan.start : plan.start + plan.rows]
            tokens = plan.view(node) if self._takes_tokens and not node.key.bigram else None
            views.append(store.add(plan.rows, size, node.start + plan.start, slots, teaches, plan.near, tokens))
        self._tier.trie.set_views(node, views)
        if self._finds and not is_near_miss(node.key.namespace):
            for plan, view in zip(plans, views, strict=True):
                self._tier.near.add(view.block, node, plan.tokens(node))
        self._log("write", node=node.id, tokens=len(node), near=sum(plan.num_near for plan in plans))
        return True

    @property
    def _takes_tokens(self) -> bool:
        return self._tier.codec is not None and self._tier.codec.takes_tokens

    @property
    def _finds(self) -> bool:
        codec = self._tier.codec
        return self._tier.config.delta and codec is not None and codec.takes_references

    def _find(self, node: Node, plan: _Plan) -> tuple[BlockReference, ...]:
        return self._tier.near.find(node.key.namespace, plan.tokens(node))

    def _sizes_of(self, node: Node, plans: list[_Plan]) -> list[int]:
        return [self.sizes(plan.rows, node.start + plan.start, plan.num_near) for plan in plans]

    def settle(self, node: Node) -> None:
        """Charge what the blocks of a hot node turned out to need, and those that they refer to.

        All of them are encoded. Makes room for what that is more; without room the node's views go.
        """
        blocks = {view.block.id: view.block for view in node.views}
        for block in list(blocks.values()):
            blocks |= {reference.block.id: reference.block for reference in block.references}
        open_blocks = [block for block in blocks.values() if not block.settled]
        if not open_blocks:
            return
        sizes = [block.num_bytes for block in open_blocks]
        if not self.sizes.exact:
            sizes = self._agree_max([len(block.data) if block.data is not None else 0 for block in open_blocks])
        for block, size in zip(open_blocks, sizes, strict=True):
            self._tier.store.settle(block, size)
            if not size:  # encoded on no rank
                self._tier.near.forget(block)
            elif block.teaches:
                near = sum(reference.num_rows for reference in block.references)
                self._tier.stats.near_saved_bytes += self.sizes.learn(block.num_rows, size, near)
        if self._tier.store.free_bytes >= 0 or self._make_room(0, copies=True, keep=node):
            return
        self._tier.stats.store_full += 1
        self._tier.store.release(self._tier.trie.clear_views(node))
        self._make_room(0, copies=True)  # other hot nodes may need the same blocks

    def _make_room(self, num_bytes: int, *, copies: bool, keep: Node | None = None) -> bool:
        """Free ``num_bytes`` of the store, or nothing; arguments as of :func:`choose_victims`."""
        shortage = num_bytes - self._tier.store.free_bytes
        if shortage <= 0 or num_bytes > self._tier.store.budget_bytes:
            return shortage <= 0
        victims = choose_victims(self._tier.trie, shortage, copies=copies, keep=keep)
        for node in victims:
            if node.hot:
                self.release_copies(node)
                self._log("drop_copy", node=node.id, tokens=len(node))
            else:
                self.drop_cold(node)
        return bool(victims)

    def release_copies(self, node: Node) -> None:
        """Give up the blocks of a hot node."""
        self._finish_reads(node.views)
        self._tier.store.release(self._tier.trie.clear_views(node))

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
