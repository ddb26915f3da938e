"""``PLTRadixCache``: SGLang's prefix-cache contract over the trie and its cold tier."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)

from sglang_plt.cache.cold_tier import ColdTier
from sglang_plt.cache.decision_log import DecisionLog
from sglang_plt.cache.events import TrieEvents
from sglang_plt.cache.grafts import Grafts
from sglang_plt.cache.load_back import LoadBack
from sglang_plt.cache.metrics import CacheMetrics
from sglang_plt.cache.model_bits import model_bits
from sglang_plt.cache.policy import CachePolicy, TierRates
from sglang_plt.cache.row_codec import RowCodec
from sglang_plt.cache.stats import CacheStats
from sglang_plt.cache.trie_cache import TrieCache
from sglang_plt.clusters import Clusters
from sglang_plt.codec.workers import Run, in_turn
from sglang_plt.config import PLTConfig
from sglang_plt.keys import Key, make_namespace
from sglang_plt.trie import Node, Trie, chain

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class PLTRadixCache(TrieCache):
    """Drop-in for SGLang's radix caches.

    Args:
        params: pools, page size and options of the policy as SGLang builds them.
        config: our options; the policy is that of ``config``, whatever ``params`` says.
        codec: encodes and decodes rows of the pool; None is a cache without a cold tier.
        budget_bytes: bytes of the cold tier on this rank.
        rank: tensor-parallel rank, for logs and metrics.
        agree_min: smallest of an integer over all ranks; needed where ranks hold different rows.
        agree_max: largest of each of some integers over all ranks, as well.
        rates: what tokens cost, the same on all ranks; for the policy ``value``.
        run: runs the decoding of the blocks of a restore.
    """

    def __init__(
        self,
        params: CacheInitParams,
        config: PLTConfig | None = None,
        codec: RowCodec | None = None,
        budget_bytes: int = 0,
        *,
        rank: int = 0,
        agree_min: Callable[[int], int] = lambda value: value,
        agree_max: Callable[[list[int]], list[int]] = lambda values: values,
        background: bool = True,
        rates: TierRates | None = None,
        run: Run = in_turn,
    ):
        self.config = config or PLTConfig()
        self.decisions = DecisionLog(self.config.decision_log, rank)
        self.policy = CachePolicy(
            self.config.policy, params.eviction_policy_config, rates, params.page_size, self.decisions.record
        )
        super().__init__(params, Trie(params.page_size, self.policy.order, self.policy.lower_order))
        self.clusters = Clusters(self.trie, self.config.delta_threshold)
        self.stats = CacheStats()
        self.events = TrieEvents(params)
        self.kv_events = self.events.recorder
        self.trie.on_split = chain(self.events.on_split, self.policy.on_split)
        self.cold = ColdTier(
            self.trie,
            codec,
            self.config,
            budget_bytes,
            self.stats,
            agree_min=agree_min,
            agree_max=agree_max,
            log=self.decisions.record,
            background=background,
            run=run,
        )
        self.agree_min = agree_min
        self.grafts: Grafts | None = None
        self.load_back = LoadBack(self.trie, self.cold, self._allocate, self._free)
        self.metrics: CacheMetrics | None = None
        if params.enable_metrics:
            self.init_metrics_collector()
            self.metrics = CacheMetrics(self, rank)
        self.reset()

    # -- life cycle -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything; the caller clears the pools."""
        self.cold.clear()
        self.load_back.clear()
        if self.grafts is not None:
            self.grafts.clear()
        self.trie.clear()
        self.root_node = self.trie.root
        self.events.all_cleared()
        self.decisions.record("reset")
        self._publish()

    def release_host_resources(self) -> None:
        self.cold.writer.close()
        self.decisions.close()

    def set_grafts(self, grafts: Grafts) -> None:
        """Reuse rows of prompts that are nearly the same."""
        self.grafts = grafts
        if self.metrics is not None:
            self.metrics.add_near_miss(grafts.stats)

    # -- match ----------------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Longest prefix held hot, and behind it what a restore can bring back (reported as a host hit).

        Cold nodes of a match for a request stay pinned until the next such match or its restore.
        """
        req = params.req
        if req is not None:
            self.load_back.unpin()
        if self.disable:
            return MatchResult(0, self.root_node, self.root_node, self.root_node)
        key = self._key(params.key)
        hot, last = self.trie.match(key)
        if self.grafts is not None and req is not None:
            hot, last = self.grafts.match(req, key, last.stop) or (hot, last)
        hot_len, resident_len = hot.stop, last.stop
        cold_len = resident_len - hot_len
        if cold_len < self.config.restore_threshold:
            last, cold_len = hot, 0
        if req is not None:
            self.policy.matched(req, resident_len)
            self.stats.matched_hot_tokens += hot_len
            self.stats.matched_cold_tokens += cold_len
            self.decisions.record("match", hot=hot_len, cold=cold_len)
            if cold_len:
                self.load_back.pin(last)
        # device_prefix_len, last_device_node, last_host_node, best_match_node, host_hit_length; by position for speed
        return MatchResult(hot_len, hot, hot, last, cold_len, full_kv_hit_length=hot_len + cold_len)

    # -- restore --------------------------------------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node]:
        """Restore all of a promised host hit or nothing; zero tokens make the scheduler recompute."""
        started = time.perf_counter()
        last: Node = params.best_match_node
        restored = self.load_back.restore(last, params.host_hit_length)
        for node in restored:
            self.events.stored(node)
        self.stats.observe("restore", time.perf_counter() - started)
        self._publish()
        if restored:
            return params.host_hit_length, last
        return 0, params.req.last_node if params.req is not None else self.load_back.last_hot(last)

    # -- insert ---------------------------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert ``params.value`` under ``params.key``; its slots behind ``prefix_len`` then belong to the tree."""
        if self.disable:
            return InsertResult(prefix_len=0)
        assert params.key is not None
        key = self._key(params.key)
        value = params.value
        if value is None:
            value = torch.tensor(params.key.token_ids, dtype=torch.int64)
        prefix_len, node = self.trie.insert(
            key,
            lambda start, stop: value[start:stop].clone(),
            priority=params.priority or 0,
            counted_len=params.inserted_len,
            on_new=self.events.stored,
        )
        return InsertResult(prefix_len=prefix_len, last_device_node=node)

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's first ``up_to`` tokens, give back its duplicates and anchor it on the tree's copy."""
        if self.disable:
            return
        grafts = self.grafts
        if grafts is not None and grafts.owns_rows(req):
            if req.finished():
                grafts.publish(req, up_to)
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        namespace = make_namespace(req.extra_key, req.cache_salt) if grafts is None else grafts.namespace_of(req)
        tokens: array = req.full_untruncated_fill_ids
        key = Key(tokens, namespace, self.is_eagle, up_to - 1 if self.is_eagle else up_to)
        key_len = key.aligned_len(self.page_size)
        priority = req.priority or 0
        hot_len, node = self.trie.insert(
            key,
            lambda start, stop: row[start:stop].to(torch.int64, copy=True),
            priority=priority,
            counted_len=req.kv.cache_inserted_len,
            on_new=self.events.stored,
            model_bits=None if self.is_eagle else model_bits(req),
        )
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, key_len)
        self._split_at_prompt(req, key, key_len, priority)

        protected = req.kv.cache_protected_len
        if hot_len > protected:
            duplicates = row[protected:hot_len].to(torch.int64, copy=True)
            self.req_to_token_pool.write(
                (req.kv.req_pool_idx, slice(protected, hot_len)), self._slots_between(node, protected, hot_len)
            )
            self.token_to_kv_pool_allocator.free_segment(duplicates, start_pos=protected)
        req.kv.cache_protected_len = key_len

        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node
        if self.decisions.enabled:
            learns = self.trie.estimator.learns(namespace)
            bits = self.trie.estimator.path_bits(node) if learns else 0
            self.decisions.record("checkpoint", tokens=key_len, duplicates=hot_len - protected, bits=bits)
        if grafts is not None:
            grafts.computed(req, up_to)
        if req.output_ids and not req.finished():  # its prompt has been computed; encode that while it decodes
            self.cold.write_ahead(self._free_share(), node)

    def _split_at_prompt(self, req: Req, key: Key, key_len: int, priority: int) -> None:
        """Let the prompt outlive the answer: its nodes rank one priority higher and end where the prompt ends."""
        prompt_len = len(req.origin_input_ids) - int(self.is_eagle)
        prompt_len -= prompt_len % self.page_size
        if 0 < prompt_len < key_len:
            prompt = Key(key.tokens, key.namespace, key.bigram, prompt_len)
            self.trie.insert(prompt, _never, priority=priority + 1, counted_len=prompt_len)

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """A request has ended: learn from it, and write ahead what eviction would take next now."""
        if not self.disable:
            if checkpointed:
                self.policy.served(req)
            if self.grafts is not None:
                self.grafts.ended(req)
            self.cold.write_ahead(self._free_share())
            self.cold.prune_replay()
            self._publish()

    def _free_share(self) -> float:
        allocator = self.token_to_kv_pool_allocator
        return allocator.available_size() / allocator.size

    # -- evict ----------------------------------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least ``params.num_tokens`` slots if unlocked nodes hold as many; cold copies stay where they fit."""
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        started = time.perf_counter()
        freed: list[torch.Tensor] = []
        num_evicted = 0
        while num_evicted < params.num_tokens and (node := self.trie.hot_queue.peek()) is not None:
            if spared := self.policy.spares(node, params.num_tokens - num_evicted):
                self.trie.split(node, spared)  # the node is the lower part from now on
            self.events.removed(node)
            num_evicted += len(node)
            freed.append(self.cold.demote(node))
        if freed:
            # node slots are page-exact, and so is their concatenation
            self.token_to_kv_pool_allocator.free_segment(torch.cat(freed), start_pos=0)
        self.cold.prune_replay()
        self.update_eviction_metrics(num_evicted, started)
        self.stats.observe("evict", time.perf_counter() - started)
        self._publish()
        return EvictResult(num_tokens_evicted=num_evicted)

    def _publish(self) -> None:
        if self.metrics is not None:
            self.metrics.publish()


def _never(start: int, stop: int) -> torch.Tensor:
    raise AssertionError(f"positions [{start}, {stop}) were inserted a moment ago")
