"""Drives any SGLang prefix cache as the scheduler does, over a real pool whose rows name their own prefix.

The KV of a token is a function of the tokens before it. The harness writes that function's value into a row when a
request computes it, and checks it in every row a request gets from the cache: wrong KV is seen at once.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_plt.cache.prefix_cache import PLTRadixCache
from sglang_plt.config import PLTConfig

MAX_REQUESTS = 8
MAX_LEN = 2048


def row_values(tokens: array, namespace: Any = None) -> torch.Tensor:
    """One exactly representable float per position, a hash of the prefix that ends there."""
    state = hash(namespace) & 0xFFFF
    values = []
    for token in tokens:
        state = (state * 31 + token + 7) % 16_777_213
        values.append(float(state))
    return torch.tensor(values, dtype=torch.float32)


class Sized(list):
    """Encoded rows that say how many bytes they take."""

    def __init__(self, rows: Any, size: int):
        super().__init__(rows)
        self.size = size

    def __len__(self) -> int:
        return self.size


class CopyCodec:
    """The simplest row codec: the rows themselves.

    ``failing`` makes it raise where a test wants it to; without ``fixed_size`` blocks take what their rows say.
    """

    lossless = True
    fixed_size = True
    takes_references = False
    takes_tokens = False

    def __init__(self, pool: MHATokenToKVPool):
        self.buffers = [pool.get_key_buffer(0), pool.get_value_buffer(0)]
        self.failing: set[str] = set()

    def num_bytes(self, num_rows: int, position: int) -> int:
        return 8 * num_rows + 16

    def advance(self, agree_min: Any) -> bool:
        return False

    def encode(self, slots: torch.Tensor, position: int, teaches: bool = False) -> Any:
        if "encode" in self.failing:
            raise RuntimeError("encode was told to fail")
        assert len(slots) > 0
        rows = [buffer[slots].flatten() for buffer in self.buffers]
        return Sized(rows, 1 + int(rows[0].abs().sum()) % self.num_bytes(len(slots), position))

    def decode(self, data: Any, start: int, stop: int, slots: torch.Tensor, position: int) -> None:
        if "decode" in self.failing:
            raise RuntimeError("decode was told to fail")
        for buffer, rows in zip(self.buffers, data, strict=True):
            buffer[slots] = rows[start:stop].reshape(-1, 1, 1)


@dataclass(eq=False)
class Request:
    """What the caches read of SGLang's ``Req``."""

    rid: str
    origin_input_ids: array
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    output_ids: array = field(default_factory=lambda: array("q"))
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    extend_end: int = 0
    is_finished: bool = False
    skip_radix_cache_insert: bool = False
    session: Any = None
    session_id: str | None = None
    kv_rotation_base: int | None = None
    beam_group: Any = None
    retracted_stain: bool = False
    finished_len: int | None = None

    def __post_init__(self) -> None:
        self.full_untruncated_fill_ids = array("q", self.origin_input_ids)

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        return (self.extra_key, self.cache_salt or None)

    def finished(self) -> bool:
        return self.is_finished

    def refresh_fill_ids(self) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def owned_kv_len(self) -> int:
        return self.kv.kv_committed_len


class Harness:
    """One cache over its own pool.

    Args:
        kind: ``plt``, ``plt-hot`` (no cold tier), ``radix``, ``unified-python`` or ``unified-rust``.
        slots: tokens of the pool.
        policy: of eviction; what ``config`` says of it does not count.
    """

    def __init__(
        self,
        kind: str,
        *,
        slots: int,
        page_size: int = 1,
        policy: str = "lru",
        cold_bytes: int = 1 << 30,
        config: PLTConfig | None = None,
        background: bool = False,
        events: bool = False,
        is_eagle: bool = False,
    ):
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page_size))
        self.kind = kind
        self.page_size = page_size
        self.slots = slots
        self.pool = MHATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=1,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", self.pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(slots, page_size, torch.float32, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(MAX_REQUESTS, MAX_LEN, "cpu", False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            is_eagle=is_eagle,
            eviction_policy=policy,
            enable_kv_cache_events=events,
        )
        self.codec: CopyCodec | None = None
        self.cache: Any
        if kind == "radix":
            self.cache = RadixCache(params)
        elif kind.startswith("unified-"):
            params.tree_components = (ComponentType.FULL,)
            params.tree_core_backend = kind.removeprefix("unified-")
            self.cache = UnifiedRadixCache(params)
        else:
            self.codec = CopyCodec(self.pool) if kind == "plt" else None
            self.cache = PLTRadixCache(
                params,
                replace(config or PLTConfig(restore_threshold=1, write_ahead=32), policy=policy),
                self.codec,
                cold_bytes if kind == "plt" else 0,
                background=background,
            )
        self.running: list[Request] = []

    # -- what the scheduler does ----------------------------------------------------------------------------------

    def key(self, request: Request, length: int) -> RadixKey:
        return RadixKey(
            request.full_untruncated_fill_ids, request.extra_key, limit=length, cache_salt=request.cache_salt
        )

    def admit(self, request: Request, chunk: int | None = None) -> tuple[int, int]:
        """Match, restore, compute the prompt (or its first ``chunk`` tokens); returns (device, host) hit lengths."""
        tokens = request.full_untruncated_fill_ids
        match = self.cache.match_prefix(
            MatchPrefixParams(key=self.key(request, len(tokens) - 1), req=request if self.is_ours else None)
        )
        request.prefix_len, request.last_node = match.device_prefix_len, match.last_device_node
        request.kv.cache_protected_len = request.prefix_len
        hits = (match.device_prefix_len, match.host_hit_length)
        if match.host_hit_length:
            guard = self.cache.lock(request.last_node)
            loaded, request.last_node = self.cache.init_load_back(
                InitLoadBackParams(match.best_match_node, match.host_hit_length, req=request)
            )
            self.cache.unlock(guard)
            assert loaded in (0, match.host_hit_length)
            request.prefix_len += loaded
            request.kv.cache_protected_len = request.prefix_len
        request.lock = self.cache.lock(request.last_node)
        (request.kv.req_pool_idx,) = self.rows.alloc_rows(1)
        if request.prefix_len:
            prefix = self.cache.path_device_indices(request.last_node)[: request.prefix_len]
            self.rows.write((request.kv.req_pool_idx, slice(0, request.prefix_len)), prefix)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = request.prefix_len
        self.running.append(request)
        self.check_rows(request)
        self.extend(request, len(tokens) if chunk is None else min(len(tokens), request.prefix_len + chunk))
        return hits

    def extend(self, request: Request, end: int) -> None:
        """Compute and checkpoint tokens up to ``end``, as one prefill chunk; with the last comes an output token."""
        self.compute(request, end)
        request.extend_end = end
        outputs = request.output_ids
        if end == len(request.full_untruncated_fill_ids):
            request.output_ids = outputs + array("q", [0])
        self.cache.checkpoint(request, up_to=end)
        request.output_ids = outputs
        request.prefix_len = end

    def compute(self, request: Request, end: int) -> None:
        start, page = request.kv.kv_allocated_len, self.page_size
        if end <= start:
            return
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        covered = -(-start // page) * page  # the last page is already ours up to here
        position = start
        for position in range(start, min(covered, end)):
            row[position] = row[position - 1] + 1
        first = min(covered, end)
        if end > first:
            count = -(-(end - first) // page) * page
            shortfall = count - self.allocator.available_size()
            if shortfall > 0:
                self.cache.evict(EvictParams(num_tokens=shortfall))
            slots = self.allocator.alloc(count)
            assert slots is not None, "the harness admitted more than the pool holds"
            row[first:end] = slots[: end - first]
        values = row_values(request.full_untruncated_fill_ids[:end], request.namespace)[start:]
        where = row[start:end].long()
        self.pool.get_key_buffer(0)[where] = values.reshape(-1, 1, 1)
        self.pool.get_value_buffer(0)[where] = -values.reshape(-1, 1, 1)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = end

    def decode(self, request: Request, token: int) -> None:
        request.output_ids.append(token)
        request.refresh_fill_ids()
        self.compute(request, len(request.full_untruncated_fill_ids))

    def release(self, request: Request, *, checkpoint: bool) -> None:
        """Finish (``checkpoint``), abort or retract."""
        request.is_finished = checkpoint
        self.running.remove(request)
        release_kv_cache(request, self.cache, checkpoint=checkpoint)
        request.kv.req_pool_idx = None

    def evict(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def flush(self) -> None:
        assert not self.running
        self.cache.reset()
        self.allocator.clear()

    # -- what must always hold ------------------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        return self.kind.startswith("plt")

    def private_tokens(self) -> int:
        page = self.page_size
        return sum(-(-r.kv.kv_allocated_len // page) * page - r.kv.cache_protected_len for r in self.running)

    def check_rows(self, request: Request) -> None:
        """Every committed row of ``request`` holds the KV of its own prefix."""
        end = request.kv.kv_committed_len
        where = self.rows.req_to_token[request.kv.req_pool_idx, :end].long()
        values = row_values(request.full_untruncated_fill_ids[:end], request.namespace)
        assert torch.equal(self.pool.get_key_buffer(0)[where].flatten(), values)
        assert torch.equal(self.pool.get_value_buffer(0)[where].flatten(), -values)

    def check(self) -> None:
        """The pool invariant, single ownership of every slot, and our own bookkeeping."""
        cache = self.cache
        accounted = (
            self.allocator.available_size() + cache.evictable_size() + cache.protected_size() + self.private_tokens()
        )
        assert accounted == self.slots, (
            f"available {self.allocator.available_size()} + evictable {cache.evictable_size()} + protected "
            f"{cache.protected_size()} + private {self.private_tokens()} != {self.slots}"
        )
        for request in self.running:
            self.check_rows(request)
        if not self.is_ours:
            return
        cache.trie.check()
        owned = cache.all_values_flatten()
        free = (self.allocator.get_all_free_pages()[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        private = [
            self.rows.req_to_token[r.kv.req_pool_idx, r.kv.cache_protected_len : r.kv.kv_allocated_len].long()
            for r in self.running
        ]
        every = torch.cat([owned, free, *private])
        assert len(torch.unique(every)) == len(every), "a slot has two owners"
        self.check_blocks()

    def check_blocks(self) -> None:
        """The store's counts are those of the blocks that views or other blocks refer to; nearness follows them."""
        store, near = self.cache.cold.store, self.cache.cold.near
        views = [view for node in self.cache.trie.nodes() for view in node.views]
        viewed = {view.block.id: view.block for view in views}
        references = [reference.block for block in viewed.values() for reference in block.references]
        blocks = viewed | {block.id: block for block in references}
        assert store.used_bytes == sum(block.num_bytes for block in blocks.values())
        assert store.used_bytes <= store.budget_bytes
        assert store.num_blocks == len(blocks)
        assert store.num_dependants == sum(bool(block.references) for block in blocks.values())
        assert store.num_orphans == len(blocks) - len(viewed)
        for block in blocks.values():
            assert block.refs == sum(view.block is block for view in views)
            assert block.dependants == sum(other is block for other in references)
            assert not (block.dependants and block.references), "a difference from a difference"
        assert set(near._members) <= {id for id, block in viewed.items() if not block.references}
        assert len(near._index) == len(near)
