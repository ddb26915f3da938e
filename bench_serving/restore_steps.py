"""What one eviction and one restore add to a scheduling step: our cache over real pools, driven without a server."""

from __future__ import annotations

import gc
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from bench_serving.overhead_arms import FakeReq
from bench_serving.restore_arms import Sequences, fill, make_pool
from sglang_plt.cache.prefix_cache import PLTRadixCache
from sglang_plt.codec import block_limit, decode_block, encode_block, exact_rows, make_codec
from sglang_plt.config import PLTConfig
from sglang_plt.host.pool import pool_rows

STEP = 256
"""Tokens of a node, and of an eviction."""
_POOL_PROMPTS = 8
_COLD_PROMPTS = 4
_WARM_UP = 8
_FINGERPRINT = 2


class BlockCodec:
    """:class:`sglang_plt.cache.row_codec.RowCodec` over a pool of this process."""

    def __init__(self, name: str, pool: MHATokenToKVPool, sequences: Sequences):
        self._codec = make_codec(name, pool_rows(pool), None if name == "raw" else sequences.rotary)
        self._codec.warm_up()
        self.lossless = name == "raw"
        self.fixed_size = self._codec.fixed_size
        self.takes_references = False
        self.takes_tokens = False

    def num_bytes(self, num_rows: int, position: int) -> int:
        return block_limit(self._codec, num_rows, exact_rows(position, num_rows))

    def advance(self, agree_min) -> bool:
        return False

    def encode(
        self, slots: torch.Tensor, position: int, teaches: bool = False, references: Any = (), tokens: Any = None
    ) -> np.ndarray:
        return encode_block(self._codec, _FINGERPRINT, slots, position)

    def decode(
        self,
        data: np.ndarray,
        start: int,
        stop: int,
        slots: torch.Tensor,
        position: int,
        references: Any = (),
        tokens: Any = None,
    ) -> None:
        decode_block(self._codec, _FINGERPRINT, data, start, stop, slots, position)


class Driver:
    """A cache whose pool holds eight prompts, each a chain of nodes of 256 tokens.

    Args:
        sequences: whose rows every slot holds, and how long a prompt is.
        write_ahead: what a release queues for encoding, in tokens.
    """

    def __init__(self, sequences: Sequences, codec: str, write_ahead: int, dtype: torch.dtype = torch.float32):
        self.tokens = sequences.tokens
        layout = replace(sequences.rows.layout, dtype=dtype)
        num_slots = _POOL_PROMPTS * self.tokens
        pool = make_pool(layout, num_slots)
        fill(pool_rows(pool), torch.arange(1, num_slots + 1), sequences.rows)
        self.allocator = TokenToKVPoolAllocator(num_slots, dtype, "cpu", pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(2, self.tokens, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        budget_bytes = num_slots * layout.row_bytes
        config = PLTConfig(codec=codec, policy="lru", write_ahead=write_ahead)
        self.cache = PLTRadixCache(params, config, BlockCodec(codec, pool, sequences), budget_bytes)
        # the free list of a server that has run for a while is in no order
        pages = self.allocator.free_pages
        self.allocator.free_pages = pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(1))]
        self._first = 0

    def insert(self) -> array:
        """Insert a prompt that the cache has never seen; returns its key."""
        self._first += 1
        key = array("q", [self._first, *range(1 << 20, (1 << 20) + self.tokens - 1)])
        slots = self.allocator.alloc(self.tokens)
        assert slots is not None, "evict before"
        for start in range(0, self.tokens, STEP):
            part = key[: start + STEP]
            self.cache.insert(
                InsertParams(RadixKey(part), slots[: len(part)], prev_prefix_len=start, inserted_len=start)
            )
        return key

    def settle(self) -> None:
        """What the end of a request sets going, and its end."""
        self.cache.on_release(FakeReq(array("q"), array("q")), checkpointed=True)
        self.cache.cold.writer.drain()

    def evict(self, num_tokens: int) -> float:
        """Seconds of one eviction, which must free exactly ``num_tokens``."""
        started = time.perf_counter()
        found = self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
        seconds = time.perf_counter() - started
        if found != num_tokens:
            raise RuntimeError(f"evicted {found} tokens, not {num_tokens}")
        return seconds

    def restore(self, key: array, num_tokens: int) -> float:
        """Seconds of restoring the last ``num_tokens`` tokens of ``key``, all of which must be cold."""
        req = FakeReq(key, key)
        match = self.cache.match_prefix(MatchPrefixParams(RadixKey(key), req=req))
        if match.host_hit_length != num_tokens:
            raise RuntimeError(f"{match.host_hit_length} cold tokens were found, not {num_tokens}")
        req.last_node = match.last_device_node
        params = InitLoadBackParams(match.best_match_node, num_tokens, req=req)
        started = time.perf_counter()
        loaded, _ = self.cache.init_load_back(params)
        seconds = time.perf_counter() - started
        if loaded != num_tokens:
            raise RuntimeError(f"restored {loaded} tokens, not {num_tokens}")
        return seconds

    def close(self) -> None:
        self.cache.release_host_resources()


def evictions(driver: Driver, count: int) -> list[float]:
    """Seconds of ``count`` evictions of one node of 256 tokens, from a full pool of prompts seen once."""
    for _ in range(_POOL_PROMPTS):
        driver.insert()
    seconds: list[float] = []
    while len(seconds) < count + _WARM_UP:
        driver.settle()
        seconds += [driver.evict(STEP) for _ in range(0, driver.tokens, STEP)]
        driver.insert()
    return seconds[_WARM_UP : _WARM_UP + count]


def restores(driver: Driver, count: int) -> Iterator[tuple[str, list[float]]]:
    """Seconds of ``count`` restores of one node, and of a whole prompt; with room in the pool and without."""
    keys = []
    for _ in range(_POOL_PROMPTS + _COLD_PROMPTS):
        if driver.allocator.available_size() < driver.tokens:
            driver.evict(driver.tokens)
        keys.append(driver.insert())
    turns = cycle(keys)  # more prompts than the pool holds, least recently used first: the next one is always cold
    for num_tokens in (STEP, driver.tokens):
        for room, label in ((True, ""), (False, "_pool_full")):
            seconds: list[float] = []
            while len(seconds) < count + _WARM_UP:
                driver.settle()
                if room:
                    driver.evict(driver.tokens)
                key = next(turns)
                stops = range(num_tokens, driver.tokens + 1, num_tokens)
                seconds += [driver.restore(key[:stop], num_tokens) for stop in stops]
            yield f"{num_tokens}_tokens{label}", seconds[_WARM_UP : _WARM_UP + count]
            if room and driver.allocator.available_size():
                raise RuntimeError("the pool should be full")


def measure(sequences: Sequences, codec: str, count: int) -> dict[str, dict[str, list[float]]]:
    """``[metric][arm]`` -> seconds, ``count`` of each; metrics are ``evict_step`` and ``restore_step``."""
    result: dict[str, dict[str, list[float]]] = defaultdict(dict)
    gc.collect()
    gc.freeze()  # what the start of this process left is nothing that a step should scan
    try:
        for label, write_ahead in (("write_ahead", 2 * sequences.tokens), ("no_write_ahead", 0)):
            driver = Driver(sequences, codec, write_ahead)
            result["evict_step"][f"{codec}/{label}"] = evictions(driver, count)
            stats = driver.cache.stats
            if bool(stats.blocks_written_ahead) != bool(write_ahead) or (stats.blocks_written_late and write_ahead):
                raise RuntimeError(f"blocks written ahead and late: {stats}")
            driver.close()
        driver = Driver(sequences, codec, 2 * sequences.tokens)
        for arm, seconds in restores(driver, count):
            result["restore_step"][f"{codec}/{arm}"] = seconds
        driver.close()
    finally:
        gc.unfreeze()
    return result
