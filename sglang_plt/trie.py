"""The trie of served prefixes: which token sequences exist, and in which tier their KV is.

No SGLang and no torch here: slots are any sequence that slices. Time is a logical clock, one tick per operation, so
that every rank sees the same order. :mod:`sglang_plt.tiers` has the states of a node and the invariants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_plt.blocks import split_views
from sglang_plt.keys import Key
from sglang_plt.node import Node
from sglang_plt.policy import EvictionOrder
from sglang_plt.probability import DECAY_FROM, ONE, Context, prior_weight
from sglang_plt.tiers import TieredNodes

__all__ = ["Node", "OnSplit", "SlotReader", "Trie", "chain"]

OnSplit = Callable[[Node, Node, int], None]
"""Receives ``(upper, lower, length)`` before the lower part's key is cut."""

SlotReader = Callable[[int, int], Any]
"""``read(start, stop)`` returns an owned copy of the slots of positions ``[start, stop)`` of the inserted sequence."""


def chain(*callbacks: OnSplit | None) -> OnSplit | None:
    """One callback that calls all that are not None, in order."""
    present = [callback for callback in callbacks if callback is not None]
    if len(present) < 2:
        return present[0] if present else None

    def call(upper: Node, lower: Node, length: int) -> None:
        for callback in present:
            callback(upper, lower, length)

    return call


class Trie(TieredNodes):
    """Match, insert and split over tiered nodes; arguments as for :class:`sglang_plt.node_tree.NodeTree`.

    Attributes:
        on_split: told about every split.
    """

    def __init__(self, page_size: int, order: EvictionOrder, lower_order: EvictionOrder | None = None):
        super().__init__(page_size, order, lower_order)
        self.on_split: OnSplit | None = None

    # -- lookup ---------------------------------------------------------------------------------------------------

    def match(self, key: Key) -> tuple[Node, Node]:
        """Longest resident prefix of ``key``.

        A node that is matched in part is split at the end of the match. Access times of the path are refreshed.

        Returns:
            (last hot node, last resident node): the second is the first or lies below it; ``node.stop`` is the length
            of the match.
        """
        now = self.tick()
        node = hot = self.root
        node.last_access = now
        page_size = self.page_size
        offset, length = 0, key.aligned_len(page_size)
        while offset < length:
            child = node.children.get(key.page_at(offset, page_size) if offset else self._edge(node, key, 0))
            if child is None or (child.slots is None and not child.views):
                break
            matched = child.key.common_len(key, offset, length, page_size)
            if matched < child.key.length:
                child = self.split(child, matched)
            child.last_access = now
            if child.queue is not None:
                child.queue.add(child)
            node = child
            if child.slots is not None:
                hot = child
            offset += matched
        return hot, node

    def insert(
        self,
        key: Key,
        read_slots: SlotReader,
        *,
        priority: int = 0,
        counted_len: int = 0,
        on_new: Callable[[Node], None] | None = None,
        model_bits: Callable[[int, int], int | None] | None = None,
    ) -> tuple[int, Node]:
        """Insert ``key``; its rows are in the slots that ``read_slots`` names.

        Nodes that are already hot keep their slots. Cold and replay nodes on the path adopt the inserted slots, since
        those hold freshly computed rows; a node without views behind the path is created for the rest.

        Args:
            counted_len: nodes that end at or before this position were counted as a hit, and learned from, before.
            on_new: called for every node that became hot, root to leaf.
            model_bits: ``(start, stop)`` -> ``-log2 P`` by the model of those positions given all before them, in units
                of ``1 / probability.BIT``; None where it was not computed.

        Returns:
            (tokens of the prefix that was hot before, last node): slots of positions below the first are duplicates.
        """
        now = self.tick()
        node = self.root
        node.last_access = now
        node.priority = max(node.priority, priority)
        page_size = self.page_size
        offset, length = 0, key.aligned_len(page_size)
        context = self.estimator.context(key.namespace) if length else None
        learns = context is not None
        seen: Any = context  # what counts how often the prefix walked so far went on
        hot_len = 0
        while offset < length:
            child = node.children.get(key.page_at(offset, page_size) if offset else self._edge(node, key, 0))
            if child is None:
                break
            matched = child.key.common_len(key, offset, length, page_size)
            if matched < child.key.length:
                child = self.split(child, matched)
            if child.slots is None:
                if not child.views:
                    child.created, child.hit_count, child.priority = now, 0, priority
                self.set_hot(child, read_slots(offset, offset + matched), lossy=False)
                if on_new is not None:
                    on_new(child)
            else:
                hot_len = offset + matched
            if child.priority < priority:
                child.priority = priority
            offset += matched
            if offset > counted_len:
                child.hit_count += 1
                if learns:
                    child.weight += ONE
                    seen.total += ONE
                    if seen.total > DECAY_FROM:
                        self._decay(node, child, seen)
            seen = child
            child.last_access = now
            if child.queue is not None:
                child.queue.add(child)
            node = child
        if offset < length:
            child = Node(self._new_id(), node, key[offset:length], offset, now, priority)
            child.hit_count = 1 if length > counted_len else 0
            node.children[self._edge(node, key, offset)] = child
            if context is not None:
                self._learn_new(node, child, context, model_bits)
            self.num_nodes += 1
            self.replay_tokens += len(child)
            self.set_hot(child, read_slots(offset, length), lossy=False)
            if on_new is not None:
                on_new(child)
            node = child
        elif self.on_change is not None:
            self.on_change(node)
        return hot_len, node

    def _learn_new(self, parent: Node, child: Node, context: Context, model_bits: Any) -> None:
        """``child`` is a new way on from ``parent``, taken once."""
        child.weight = ONE
        if model_bits is not None:
            child.model_bits = model_bits(child.start, child.stop)
            if child.model_bits is not None:
                child.weight += prior_weight(child.model_bits)
        seen: Any = parent
        if parent is self.root:
            context.kinds += 1
            seen = context
        seen.total += child.weight
        if seen.total > DECAY_FROM:
            self._decay(parent, child, seen)

    def _decay(self, parent: Node, child: Node, seen: Any) -> None:
        if self.estimator.decay(parent, child, seen):
            seen.best = None  # every way on has another weight
            if self.on_change is not None:
                self.on_change(parent)

    def split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; returns the new upper part, ``node`` becomes the lower part."""
        parent = node.parent
        assert parent is not None
        assert 0 < length < len(node.key)
        assert length % self.page_size == 0
        upper = Node(self._new_id(), parent, node.key[:length], node.start, self.clock, node.priority)
        upper.last_access = node.last_access
        upper.hit_count = node.hit_count
        upper.lock_count = node.lock_count
        upper.pin_count = node.pin_count
        upper.lossy = node.lossy
        upper.weight = upper.total = node.weight
        if node.model_bits is not None:
            upper.model_bits = node.model_bits * length // len(node.key)
            node.model_bits -= upper.model_bits
        parent.children[self._edge(parent, node.key, 0)] = upper
        upper.views, node.views = split_views(node.views, length)
        if node.slots is not None:
            upper.slots, node.slots = node.slots[:length], node.slots[length:]
        if self.on_split is not None:
            self.on_split(upper, node, length)
        node.key = node.key[length:]
        node.start += length
        node.parent = upper
        upper.children[self._edge(upper, node.key, 0)] = node
        upper.hot_children = int(node.slots is not None)
        upper.resident_children = int(node.resident)
        self.num_nodes += 1
        if self.on_change is not None:
            self.on_change(upper)
        return upper
