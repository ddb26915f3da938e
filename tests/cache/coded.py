"""A cache over rows that real codecs keep: :data:`tests.codec.correlated.SOURCE` instead of the harness's numbers."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_plt.codec import (
    PROFILED,
    Reference,
    Stretch,
    block_limit,
    decode_block,
    encode_block,
    exact_rows,
    make_codec,
)
from tests.cache.harness import Harness, Request
from tests.codec.correlated import ROTARY, SOURCE, profile_of

PROMPT = array("q", range(1, 301))  # two blocks of rows and the last token, which is always computed
SLOTS = 400


class Blocks:
    """The product's blocks of one codec, over the rows of :class:`CodedHarness`."""

    lossless = False

    def __init__(self, name: str):
        self.pool = SOURCE.empty(slots=SLOTS + 1)
        profile = profile_of(SOURCE, name) if name in PROFILED else None
        self.codec = make_codec(name, self.pool, ROTARY, profile)
        self.fixed_size = self.codec.fixed_size
        self.takes_references = self.codec.takes_references

    def num_bytes(self, num_rows: int, position: int) -> int:
        return block_limit(self.codec, num_rows, exact_rows(position, num_rows))

    def advance(self, agree_min: Any) -> bool:
        return False

    def encode(self, slots: torch.Tensor, position: int, teaches: bool = False, references: Any = ()) -> np.ndarray:
        near = [Reference(block, tuple(Stretch(*part) for part in parts)) for block, parts in references]
        return encode_block(self.codec, 1, slots, position, near)

    def decode(
        self, data: np.ndarray, start: int, stop: int, slots: torch.Tensor, position: int, references: Any = ()
    ) -> None:
        decode_block(self.codec, 1, data, start, stop, slots, position, references)


class CodedHarness(Harness):
    """A cache whose KV lies in a pool of :data:`SOURCE`, since no codec but ``raw`` keeps the harness's own numbers."""

    def __init__(self, name: str):
        super().__init__("plt", slots=SLOTS)
        self.blocks = self.cache.cold.codec = Blocks(name)
        computed = SOURCE.rows(len(PROMPT), seed=1)
        self.computed = SOURCE.pool(computed, torch.arange(len(PROMPT)), ROTARY, 0)

    def compute(self, request: Request, end: int) -> None:
        start = request.kv.kv_allocated_len
        super().compute(request, end)
        slots = self.rows.req_to_token[request.kv.req_pool_idx, start:end].long()
        for target, source in zip(self.buffers(self.blocks.pool), self.buffers(self.computed), strict=True):
            target[slots] = source[start:end]

    def check_rows(self, request: Request) -> None:
        """Rows come back changed."""

    @staticmethod
    def buffers(pool: Any) -> tuple[torch.Tensor, ...]:
        return (*pool.keys, *pool.values)

    def serve(self) -> tuple[int, int]:
        """One whole request; returns its (device, host) hit."""
        request = Request("r", array("q", PROMPT))
        hits = self.admit(request)
        self.release(request, checkpoint=True)
        self.check()
        return hits

    def cached_rows(self) -> list[torch.Tensor]:
        """The rows of the prompt as they lie in the pool, all but the last."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(PROMPT)))
        assert match.device_prefix_len == len(PROMPT)
        slots = self.cache.path_device_indices(match.last_device_node)[: len(PROMPT) - 1].long()
        return [buffer[slots] for buffer in self.buffers(self.blocks.pool)]
