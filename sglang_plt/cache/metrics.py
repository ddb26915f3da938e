"""Prometheus metrics of the cache, on SGLang's own ``/metrics`` (``--enable-metrics``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from sglang_plt.cache.near_stats import NearMissStats
from sglang_plt.cache.stats import TIMED

if TYPE_CHECKING:
    from sglang_plt.cache.prefix_cache import PLTRadixCache

_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_HELP = {
    "encode": "Seconds spent encoding one block of KV rows.",
    "decode": "Seconds spent decoding the cold nodes of one restore.",
    "evict": "Seconds that one eviction added to a scheduling step.",
    "restore": "Seconds that one restore added to a scheduling step.",
    "align": "Seconds spent on finding what one block resembles.",
}


class CacheMetrics:
    """Gauges and counters named ``sglang:plt_*``, one set a tensor-parallel rank."""

    def __init__(self, cache: PLTRadixCache, rank: int):
        self._cache = cache
        self._rank = str(rank)
        self._seen: dict[str, float] = {}
        self._near_miss: NearMissStats | None = None
        label = ["tp_rank"]
        self._tokens = Gauge(
            "sglang:plt_tokens", "Tokens by tier: hot, cold, replay.", [*label, "tier"], multiprocess_mode="mostrecent"
        )
        self._cold_bytes = Gauge(
            "sglang:plt_cold_bytes", "Bytes of encoded KV held.", label, multiprocess_mode="mostrecent"
        )
        self._budget = Gauge(
            "sglang:plt_cold_budget_bytes", "Budget of the cold tier.", label, multiprocess_mode="mostrecent"
        )
        self._blocks = Gauge(
            "sglang:plt_blocks",
            "Encoded blocks: all, delta (coded as differences from others), orphan (needed by those only).",
            [*label, "kind"],
            multiprocess_mode="mostrecent",
        )
        self._evicted = Counter(
            "sglang:plt_evicted_tokens", "Tokens that left a tier; demoted: hot to cold.", [*label, "tier"]
        )
        self._counters = {
            name: Counter(f"sglang:plt_{name}", help, label)
            for name, help in {
                "restored_tokens": "Tokens brought back from the cold tier.",
                "restores": "Restores.",
                "restore_failures": "Restores given up, their tokens recomputed.",
                "encode_failures": "Blocks that could not be encoded.",
                "encoded_bytes": "Bytes of blocks encoded.",
                "decoded_bytes": "Bytes of blocks decoded.",
                "near_candidates": "Blocks aligned with a block about to be stored.",
                "near_accepted": "Blocks that another is coded as differences from.",
                "near_saved_bytes": "Bytes saved by that, against the mean of blocks without.",
                "store_full": "Demotions without room in the cold tier.",
                "blocks_written_ahead": "Demoted blocks found already encoded.",
                "blocks_written_late": "Demoted blocks encoded by the eviction itself.",
            }.items()
        }
        self._seconds = {
            what: Histogram(f"sglang:plt_{what}_seconds", _HELP[what], label, buckets=_BUCKETS) for what in TIMED
        }
        cache.stats.observer = lambda what, seconds: self._seconds[what].labels(self._rank).observe(seconds)
        self.publish()

    def add_near_miss(self, stats: NearMissStats) -> None:
        """Export what near-miss reuse counts as well."""
        label, self._near_miss = ["tp_rank"], stats
        self._near_counters = {
            name: Counter(f"sglang:plt_near_miss_{name}", help, label)
            for name, help in {
                "requests": "Requests that were given rows of a prompt that was nearly the same.",
                "grafts": "Spans of such rows.",
                "tokens": "Tokens of these spans.",
                "planned_tokens": "Tokens that such rows were found for.",
            }.items()
        }
        self._near_refusals = Counter(
            "sglang:plt_near_miss_refusals", "Requests that were computed after all, by reason.", [*label, "reason"]
        )
        deviation = Histogram(
            "sglang:plt_near_miss_deviation",
            "Squared distance of rows that could have been reused from computed ones, as a share.",
            label,
            buckets=(1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0),
        )
        stats.observer = lambda value: deviation.labels(self._rank).observe(value)

    def publish(self) -> None:
        """Bring the exported values up to date."""
        trie, cold, stats = self._cache.trie, self._cache.cold, self._cache.stats
        for tier, tokens in (
            ("hot", trie.evictable_tokens + trie.protected_tokens),
            ("cold", trie.cold_tokens),
            ("replay", trie.replay_tokens),
        ):
            self._tokens.labels(self._rank, tier).set(tokens)
        self._cold_bytes.labels(self._rank).set(cold.store.used_bytes)
        self._budget.labels(self._rank).set(cold.store.budget_bytes)
        store = cold.store
        for kind, number in (
            ("all", store.num_blocks),
            ("delta", store.num_dependants),
            ("orphan", store.num_orphans),
        ):
            self._blocks.labels(self._rank, kind).set(number)
        for name, counter in self._counters.items():
            self._advance(counter.labels(self._rank), name, getattr(stats, name))
        for tier, tokens in {**stats.dropped_tokens, "demoted": stats.demoted_tokens}.items():
            self._advance(self._evicted.labels(self._rank, tier), f"evicted/{tier}", tokens)
        if self._near_miss is not None:
            for name, counter in self._near_counters.items():
                self._advance(counter.labels(self._rank), f"near_miss/{name}", getattr(self._near_miss, name))
            for reason, number in self._near_miss.refusals.items():
                self._advance(self._near_refusals.labels(self._rank, reason), f"refusals/{reason}", number)

    def _advance(self, counter: Counter, name: str, total: float) -> None:
        step = total - self._seen.get(name, 0)
        if step:
            counter.inc(step)
            self._seen[name] = total
