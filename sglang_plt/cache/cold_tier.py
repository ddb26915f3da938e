"""Demotion, write-ahead and restore: the traffic between the device slots of a trie and its encoded blocks.

No SGLang here: a codec encodes and decodes rows by slot, ``agree_min`` makes tensor-parallel ranks agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_plt.blocks import Block, View
from sglang_plt.cache.block_room import BlockRoom
from sglang_plt.cache.layer_restores import LayerRestores
from sglang_plt.cache.near import NearBlocks
from sglang_plt.cache.row_codec import RowCodec
from sglang_plt.cache.sizes import BlockSizes
from sglang_plt.cache.stats import CacheStats
from sglang_plt.cache.views import decode_view, joined, ready
from sglang_plt.codec.workers import Run, in_turn, stand_back
from sglang_plt.config import PLTConfig
from sglang_plt.store import BlockStore, BlockWriter
from sglang_plt.trie import Node, Trie

logger = logging.getLogger(__name__)

_PLENTY = 1 / 8


class ColdTier:
    """Keeps what eviction takes from the device.

    Args:
        trie: shared with the cache that owns this tier.
        codec: None switches the tier off; everything evicted is then gone.
        agree_min: the smallest of an integer over all ranks.
        agree_max: the largest of each of some integers over all ranks.
        log: receives ``(event, **fields)`` of every decision.
        run: runs calls, in any order and on any threads; returns what each raised.

    Attributes:
        layers: restores layer by layer, beside the forward pass; None restores all layers at once.
    """

    def __init__(
        self,
        trie: Trie,
        codec: RowCodec | None,
        config: PLTConfig,
        budget_bytes: int,
        stats: CacheStats,
        *,
        agree_min: Callable[[int], int] = lambda value: value,
        agree_max: Callable[[list[int]], list[int]] = lambda values: values,
        log: Callable[..., None] = lambda event, **fields: None,
        background: bool = True,
        run: Run = in_turn,
    ):
        self.trie = trie
        self.codec = codec if budget_bytes > 0 else None
        self.config = config
        self.stats = stats
        self.layers: LayerRestores | None = None
        self.near = NearBlocks(stats)
        self.store = BlockStore(budget_bytes, self.near.forget)
        self.writer = BlockWriter(self._encode, self._encode_failed, background, stand_back)
        self._room = BlockRoom(self, agree_max, log)
        self._agree_min = agree_min
        self._log = log
        self._run = run

    # -- demotion -------------------------------------------------------------------------------------------------

    def demote(self, node: Node) -> Any:
        """Take the slots of an evictable node, its rows encoded first where the store can hold them; returns the slots.

        Every row has been read when this returns, so the slots may be freed at once.
        """
        if self.layers is not None:
            self.layers.settle(node)
        if not node.views and not (node.lossy or self.codec is None):
            self.stats.store_full += not self._room.reserve(node, last_resort=True)
        if node.views:
            for view in node.views:
                if self.writer.finish(view.block):
                    self.stats.blocks_written_ahead += 1
                else:
                    self.stats.blocks_written_late += 1
            self._room.settle(node)
        if node.views:
            self.stats.demoted_tokens += len(node)
            self._log("demote", node=node.id, tokens=len(node))
        else:
            self._drop_below(node)
            self.stats.dropped_tokens["hot"] += len(node)
            self._log("drop_hot", node=node.id, tokens=len(node))
        return self.trie.clear_hot(node)

    def write_ahead(self, free_share: float = 0.0, running: Node | None = None) -> None:
        """Queue the nodes next in line for eviction for encoding, at most ``config.write_ahead`` tokens of them.

        Args:
            free_share: of the pool's slots; nothing is encoded while there are more than plenty of them.
            running: last node of a request that has been prefilled; where the line is shorter, its path comes behind.
        """
        if self.codec is None:
            return
        if self.codec.advance(self._agree_min):
            self.codec_changed()
        if not self.config.write_ahead or free_share > _PLENTY:
            return
        # copies of hot rows hold no context of their own, so they may take an eighth of the budget at most
        most = min(self.config.write_ahead, self.store.budget_bytes // (8 * self._room.sizes.of_row))
        line = self.trie.in_line(self.trie.hot_queue, most)
        if running is not None:
            left = most - sum(map(len, line))
            for node in self.trie.path(running):  # locked, so none of them is in line
                if not node.views and len(node) <= left:
                    line.append(node)
                    left -= len(node)
        queued: list[Block] = []
        for node in line:
            if node.views or node.lossy or len(node) > most:
                continue
            if not self._room.reserve(node, last_resort=False):
                break
            queued += [view.block for view in node.views]
        if queued:
            self.writer.submit(queued)

    def codec_changed(self) -> None:
        """Learn anew how large blocks are; what another codec stored is no reference."""
        self._room.sizes = BlockSizes(self.codec)
        self.near.clear()

    def _drop_below(self, node: Node) -> None:
        """Drop the cold nodes below ``node``, deepest first: without their prefix they cannot be restored."""
        stack, subtree = [child for child in node.children.values() if child.cold], []
        while stack:
            current = stack.pop()
            subtree.append(current)
            stack.extend(child for child in current.children.values() if child.cold)
        for current in reversed(subtree):
            self._room.drop_cold(current)

    def prune_replay(self) -> None:
        """Forget keys of evicted prefixes beyond ``config.replay_tokens``."""
        while self.trie.replay_tokens > self.config.replay_tokens:
            victim = self.trie.replay_queue.peek()
            if victim is None:
                return
            self.stats.dropped_tokens["replay"] += len(victim)
            self.trie.remove(victim)

    # -- restore --------------------------------------------------------------------------------------------------

    def restore(self, nodes: list[Node], slots: Any) -> bool:
        """Decode a run of cold nodes, parent first, into ``slots``; all of them become hot, or none.

        A block that is damaged, lost or fails on any rank is dropped on every rank with all that hangs below it.
        """
        started = time.perf_counter()
        failed = self._agree_min(self._decode(nodes, slots))
        if failed < len(nodes):
            if self.layers is not None:
                self.layers.abandon()
            self.stats.restore_failures += 1
            self._log("restore_failed", node=nodes[failed].id)
            for view in nodes[failed].views:
                for reference in view.block.references:  # perhaps it is that one which is damaged
                    self.near.forget(reference.block)
            self._drop_below(nodes[failed])
            self._room.drop_cold(nodes[failed])
            return False
        assert self.codec is not None
        offset = 0
        for node in nodes:
            self.trie.set_hot(node, slots[offset : offset + len(node)], lossy=not self.codec.lossless)
            offset += len(node)
        if self.layers is not None:
            self.layers.commit(nodes)
        self.stats.restores += 1
        self.stats.restored_tokens += offset
        self.stats.observe("decode", time.perf_counter() - started)
        self._log("restore", node=nodes[-1].id, tokens=offset)
        return True

    def _decode(self, nodes: list[Node], slots: Any) -> int:
        """Index of the first node that cannot be decoded on this rank; their number when all can."""
        assert self.codec is not None
        decode, run = (self.codec.decode, self._run) if self.layers is None else (self.layers.decode, self.layers.run)
        calls, blocks, offset = [], [], 0
        for index, view in joined(nodes):
            target = slots[offset : offset + len(view)]
            self.writer.finish(view.block)
            calls.append(partial(decode_view, decode, view, target, nodes[0].start + offset - view.start))
            blocks.append((index, view.block))
            offset += len(view)
            self.stats.decoded_bytes += view.block.num_bytes * len(view) // view.block.num_rows
        failed = len(nodes)
        for (index, block), error in zip(blocks, run(calls), strict=True):
            if error is not None:
                failed = min(failed, index)
                logger.warning(
                    "PLT cache: block %d (%d tokens at position %d) cannot be restored and is dropped, "
                    "its tokens are recomputed: %s: %s",
                    block.id,
                    block.num_rows,
                    block.position,
                    type(error).__name__,
                    error,
                )
        return failed

    def read(self, node: Node, start: int, stop: int, slots: Any) -> None:
        """Rebuild the rows of positions ``[start, stop)`` of a pinned cold node, as they were, into ``slots``.

        Raises:
            Exception: a block is damaged or was never encoded.
        """
        assert self.codec is not None
        position, offset = node.start, 0
        for view in node.views:
            low, high = max(start, position), min(stop, position + len(view))
            if low < high:
                self.writer.finish(view.block)
                part = View(view.block, view.start + low - position, view.start + high - position)
                decode_view(self.codec.decode, part, slots[offset : offset + len(part)], position - view.start)
                offset += len(part)
            position += len(view)

    def discard(self, node: Node) -> Any:
        """Drop an unlocked and unpinned node without resident children from every tier; its slots, or None."""
        if not node.hot:
            if node.cold:
                self._room.drop_cold(node)
            return None
        if node.views:
            self._room.release_copies(node)
        return self.trie.clear_hot(node)

    # -- encoding -------------------------------------------------------------------------------------------------

    def _encode(self, block: Block) -> Any:
        assert self.codec is not None
        started = time.perf_counter()
        given: dict[str, Any] = {}
        if block.references:
            given["references"] = [(reference.block.data, reference.stretches) for reference in ready(block)]
        if block.tokens is not None:
            given["tokens"] = block.tokens
        data = self.codec.encode(block.slots, block.position, block.teaches, **given)
        num_bytes = block.num_bytes if self._room.sizes.exact else len(data)
        self.stats.observe("encode", time.perf_counter() - started, num_bytes=num_bytes)
        return data

    def _encode_failed(self, block: Block, error: Exception) -> None:
        self.stats.encode_failures += 1
        logger.warning(
            "PLT cache: %d tokens at position %d cannot be encoded and will be recomputed: %s: %s",
            block.num_rows,
            block.position,
            type(error).__name__,
            error,
        )

    def clear(self) -> None:
        """Forget all blocks; the caller clears the trie."""
        self.writer.cancel()
        if self.layers is not None:
            self.layers.cancel()
        self.near.clear()
        self.store = BlockStore(self.store.budget_bytes, self.near.forget)
