"""What SGLang reads of a cache over our trie, and its locks; no row moves here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    IncLockRefResult,
)

from sglang_plt.keys import Key, make_namespace
from sglang_plt.trie import Node, Trie

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey


class TrieCache(BasePrefixCache):
    """Keys, locks, slots and sizes of a trie in SGLang's terms; node handles are :class:`sglang_plt.trie.Node`."""

    def __init__(self, params: CacheInitParams, trie: Trie):
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        device = getattr(self.token_to_kv_pool_allocator, "device", "cpu")
        self.device = torch.device(device) if isinstance(device, str | torch.device) else torch.device("cpu")
        self._no_slots = torch.empty((0,), dtype=torch.int64, device=self.device)
        self.trie = trie

    def supports_prefix_sharing(self) -> bool:
        return not self.disable

    def _key(self, key: RadixKey) -> Key:
        namespace = make_namespace(key.extra_key, key.cache_salt)
        bigram, length = self.is_eagle or key.is_bigram, key.limit
        if bigram and length is not None:
            length -= 1  # a limit caps raw tokens, of which bigrams need one more than they count
        return Key(key.token_ids, namespace, bigram, length)

    def touch_prefix(self, key: RadixKey) -> None:
        if not self.disable:
            self.trie.match(self._key(key))

    # -- locks ----------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        if self.disable:
            return IncLockRefResult(delta=0)
        return IncLockRefResult(delta=-self.trie.lock(node))

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if self.disable:
            return DecLockRefResult(delta=0)
        return DecLockRefResult(delta=self.trie.unlock(node))

    # -- slots ----------------------------------------------------------------------------------------------------

    def _slots_between(self, node: Node, start: int, stop: int) -> torch.Tensor:
        """Slots of positions ``[start, stop)`` on the path to ``node``."""
        parts: list[torch.Tensor] = []
        walk: Node | None = node
        while walk is not None and walk.parent is not None and walk.stop > start:
            if walk.start < stop:
                parts.append(walk.slots[max(0, start - walk.start) : stop - walk.start])
            walk = walk.parent
        parts.reverse()
        return torch.cat(parts) if parts else self._no_slots

    def path_device_indices(self, node: Node) -> torch.Tensor:
        return self._slots_between(node, 0, node.stop)

    def _allocate(self, num_tokens: int) -> torch.Tensor | None:
        allocator = self.token_to_kv_pool_allocator
        shortfall = num_tokens - allocator.available_size()
        if shortfall > 0:
            self.evict(EvictParams(num_tokens=shortfall))
        return allocator.alloc(num_tokens)

    def _free(self, slots: torch.Tensor) -> None:
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)

    # -- sizes ----------------------------------------------------------------------------------------------------

    def evictable_size(self) -> int:
        return self.trie.evictable_tokens

    def protected_size(self) -> int:
        return self.trie.protected_tokens

    def total_size(self) -> int:
        return self.trie.evictable_tokens + self.trie.protected_tokens

    def all_values_flatten(self) -> torch.Tensor:
        """Every slot that the tree owns."""
        slots = [node.slots for node in self.trie.nodes() if node.hot]
        return torch.cat(slots) if slots else self._no_slots

    def pretty_print(self) -> None:
        for node in self.trie.nodes():
            print(f"{node.start:8d} {node!r} {list(node.key.tokens[:10])}")
        print(f"#tokens: {self.total_size()}")
