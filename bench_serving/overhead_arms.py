"""The arms of :mod:`bench_serving.overhead`: our cache and SGLang's, each over pools of its own, without a server."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_plt.cache.prefix_cache import PLTRadixCache
from sglang_plt.config import PLTConfig

EDGE, BRANCH, EXTEND, OUTPUT, EVICT = 512, 128, 256, 64, 256  # tokens
OURS = {"plt": "", "plt_lru": "lru_", "plt_cold": "cold_tier_"}
"""Our arms and what marks their rows: the default policy, SGLang's, and the default policy with a cold tier."""
THEIRS = {"radix_cache": "vs_radix_cache", "rust_core": "vs_rust_core", "python_core": "vs_python_core"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a run; the tree has at least ``nodes`` nodes."""

    tokens: int = 32768
    nodes: int = 10000
    page_size: int = 1
    rounds: int = 250
    warmup: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 2 * EDGE or self.tokens % EDGE:
            raise ValueError(f"tokens must be a multiple of {EDGE} from {2 * EDGE} on, got {self.tokens}")
        if self.page_size < 1 or OUTPUT % self.page_size:
            raise ValueError(f"page_size must divide {OUTPUT}, got {self.page_size}")
        if 2 * EVICT // BRANCH * (self.warmup + self.rounds) > self.trunks * (self.edges - 1):
            raise ValueError(f"{self.rounds} rounds would evict every branch of {self.nodes} nodes; take fewer rounds")

    @property
    def edges(self) -> int:
        return self.tokens // EDGE

    @property
    def trunks(self) -> int:
        return -(-self.nodes // (2 * self.edges - 1))

    @property
    def pool_tokens(self) -> int:
        """The tree and one round: a pool under pressure, whose free list is short."""
        return self.trunks * (self.tokens + (self.edges - 1) * BRANCH) + 4 * EVICT


class FreeCodec:
    """Costs nothing and stores nothing: what is left is the tier's own work."""

    lossless = True
    fixed_size = True
    takes_references = False
    takes_tokens = False

    def num_bytes(self, num_rows: int, position: int) -> int:
        return num_rows

    def advance(self, agree_min: Any) -> bool:
        return False

    def encode(self, slots: Any, position: int, teaches: bool = False) -> Any:
        return True

    def decode(self, data: Any, start: int, stop: int, slots: Any, position: int) -> None:
        return


@dataclass(eq=False)
class FakeReq:
    """The part of SGLang's ``Req`` that caches read."""

    origin_input_ids: array
    full_untruncated_fill_ids: array
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    is_finished: bool = False
    rid: str = "bench"
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session: Any = None
    session_id: str | None = None
    kv_rotation_base: int | None = None
    lock: Any = None
    last_node: Any = None
    retracted_stain: bool = False
    output_ids: array = field(default_factory=lambda: array("q"))

    def finished(self) -> bool:
        return self.is_finished


class Arm:
    """One cache with pools of its own, driven as the scheduler drives it."""

    def __init__(self, name: str, shape: Shape):
        self.name = name
        self.pool = ReqToTokenPool(2, shape.tokens + EXTEND + OUTPUT, "cpu", enable_memory_saver=False)
        paged = (shape.page_size,) if shape.page_size > 1 else ()
        allocator_class = PagedTokenToKVPoolAllocator if paged else TokenToKVPoolAllocator
        self.allocator = allocator_class(
            shape.pool_tokens, *paged, dtype=torch.float16, device="cpu", kvcache=None, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page_size,
            tree_components=(ComponentType.FULL,),
        )
        # small enough that the warm-up fills both: a full tier pays for what it drops
        config = PLTConfig(replay_tokens=8192, write_ahead=4096, policy="lru" if name == "plt_lru" else "value")
        self.cache: Any
        self.learning_us = 0.0
        if name in OURS:
            cold = (FreeCodec(), 12288) if name == "plt_cold" else ()
            self.cache = PLTRadixCache(params, config, *cold)
            self.cache.policy.served = self._timed(self.cache.policy.served)
        elif name == "radix_cache":
            self.cache = RadixCache(params)
        else:
            params.tree_core_backend = name.removesuffix("_core")
            self.cache = UnifiedRadixCache(params)
            if self.cache._tree_core_backend != params.tree_core_backend:
                raise RuntimeError(f"SGLang fell back to the {self.cache._tree_core_backend} core for arm {name!r}")

    def _timed(self, learn: Callable[[FakeReq], None]) -> Callable[[FakeReq], None]:
        """Adds what it takes to learn from a request to :attr:`learning_us`."""

        def served(req: FakeReq) -> None:
            started = time.perf_counter_ns()
            learn(req)
            self.learning_us += (time.perf_counter_ns() - started) / 1000

        return served

    def hold(self, key: array) -> None:
        """Lock ``key``, as a request does that runs all the time."""
        self.cache.lock(self.cache.match_prefix(MatchPrefixParams(RadixKey(key))).last_device_node)

    def remember(self, key: array, output_len: int) -> None:
        """Let our policy learn that ``key`` was asked, and answered by ``output_len`` tokens."""
        if self.name in OURS:
            req = FakeReq(key, key, output_ids=array("q", bytes(8 * output_len)))
            req.last_node = self.cache.match_prefix(MatchPrefixParams(RadixKey(key), req=req)).last_device_node
            self.cache.policy.served(req)

    def alloc(self, num_tokens: int) -> torch.Tensor:
        slots = self.allocator.alloc(num_tokens)
        if slots is None:
            raise RuntimeError(f"{self.name}: {self.allocator.available_size()} slots free, {num_tokens} needed")
        return slots

    def insert(self, key: array, prefix_len: int) -> None:
        """Insert ``key``, of which the tree holds the first ``prefix_len`` tokens."""
        slots = torch.cat([torch.zeros(prefix_len, dtype=torch.int64), self.alloc(len(key) - prefix_len)])
        self.cache.insert(InsertParams(RadixKey(key), slots, prev_prefix_len=prefix_len, inserted_len=prefix_len))

    def start(self, trunk: array, tail: array) -> FakeReq:
        """Admit a request that extends ``trunk``: match, lock, allocate, prefill."""
        req = FakeReq(trunk + tail, trunk + tail)
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(req.origin_input_ids), req=req))
        assert match.device_prefix_len == len(trunk), (self.name, match.device_prefix_len)
        req.last_node, req.lock = match.last_device_node, self.cache.lock(match.last_device_node)
        req.kv.cache_protected_len = len(trunk)
        self.pool.alloc([req])
        self.pool.write(
            (req.kv.req_pool_idx, slice(0, len(trunk))), self.cache.path_device_indices(match.last_device_node)
        )
        return self.grow(req, len(trunk))

    def grow(self, req: FakeReq, start: int) -> FakeReq:
        """Allocate the slots of the request's tokens from ``start`` on."""
        stop = len(req.full_untruncated_fill_ids)
        self.pool.write((req.kv.req_pool_idx, slice(start, stop)), self.alloc(stop - start))
        req.kv.kv_committed_len = req.kv.kv_allocated_len = stop
        return req

    def checkpoint(self, req: FakeReq) -> int:
        self.cache.checkpoint(req, up_to=req.kv.kv_committed_len)
        return req.kv.cache_protected_len

    def finish(self, req: FakeReq) -> int:
        """What ``release_kv_cache`` asks of a cache."""
        self.cache.checkpoint(req, up_to=req.kv.kv_committed_len)
        self.cache.unlock(req.lock)
        self.cache.on_release(req, checkpointed=True)
        return req.kv.cache_protected_len

    def evict(self) -> int:
        return self.cache.evict(EvictParams(num_tokens=EVICT)).num_tokens_evicted

    def settle(self) -> None:
        """Let the background writer of the tier end, so that it does not run into another arm's time."""
        if self.name == "plt_cold":
            self.cache.cold.writer.drain()
