"""Where rows of requests that reused some go when these end: a namespace of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_plt.cache.donor_rows import Mover
from sglang_plt.keys import Key, make_namespace, near_miss_namespace
from sglang_plt.node import Node

if TYPE_CHECKING:
    from sglang_plt.cache.prefix_cache import PLTRadixCache


class NearTree:
    """The part of a cache's trie whose rows are not exact."""

    def __init__(self, cache: PLTRadixCache, mover: Mover):
        self._cache = cache
        self._mover = mover
        self._used = False

    def clear(self) -> None:
        """It is empty now."""
        self._used = False

    def match(self, key: Key) -> tuple[Node, Node] | None:
        """What :meth:`sglang_plt.trie.Trie.match` finds of ``key``; None where it is empty."""
        if not self._used:
            return None
        near = Key(key.tokens, near_miss_namespace(key.namespace), key.bigram, key.length)
        return self._cache.trie.match(near)

    def publish(self, req: Any, up_to: int, exact: int) -> bool:
        """Take over the rows of a request that has ended; whether it was done.

        Its first ``exact`` rows belong to the trie already and are copied, unless that is more than is gained.
        """
        cache = self._cache
        namespace = near_miss_namespace(make_namespace(req.extra_key, req.cache_salt))
        key = Key(req.full_untruncated_fill_ids, namespace, False, up_to)
        length = key.aligned_len(cache.page_size)
        if length <= 2 * exact:
            return False
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        copies = cache._allocate(exact) if exact else cache._no_slots
        if copies is None:
            return False
        self._mover.copy(row[:exact].long(), copies, 0, 0)

        def slots(start: int, stop: int) -> Any:
            parts = [copies[start : min(stop, exact)], row[max(start, exact) : max(stop, exact)].long()]
            return torch.cat(parts)

        hot_len, node = cache.trie.insert(key, slots)
        if hot_len:
            cache._free(copies[: min(hot_len, exact)])
        if hot_len > exact:
            cache.token_to_kv_pool_allocator.free_segment(row[exact:hot_len].long(), start_pos=exact)
        req.kv.cache_protected_len = length
        cache.unlock(req.lock)
        req.lock = cache.lock(node)
        req.last_node = node
        self._used = True
        return True

    def replace(self, req: Any, up_to: int) -> None:
        """Drop the rows of tokens that have been computed."""
        if not self._used:
            return
        cache = self._cache
        namespace = near_miss_namespace(make_namespace(req.extra_key, req.cache_salt))
        _, node = cache.trie.match(Key(req.full_untruncated_fill_ids, namespace, False, up_to))
        while node.parent is not None and not (node.lock_count or node.pin_count or node.resident_children):
            parent = node.parent
            slots = cache.cold.discard(node)
            if slots is not None:
                cache._free(slots)
            node = parent
