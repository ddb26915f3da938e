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
    as_tokens,
    block_limit,
    decode_block,
    encode_block,
    exact_rows,
    make_codec,
)
from tests.cache.harness import Harness, Request
from tests.codec.correlated import HIDDEN, ROTARY, SOURCE, profile_of, some_embedding
from tests.codec.near import near, picked

PROMPT = array("q", range(1, 301))  # two blocks of rows and the last token, which is always computed
NOISE = 0.02  # how much equal tokens of two prompts differ, as a share of the rows' standard deviation
SLOTS = 400
TOKENS = 512


class Blocks:
    """The product's blocks of one codec, over the rows of :class:`CodedHarness`."""

    lossless = False

    def __init__(self, name: str):
        self.pool = SOURCE.empty(slots=SLOTS + 1)
        profile = profile_of(SOURCE, name, hidden=HIDDEN) if name in PROFILED else None
        self.codec = make_codec(name, self.pool, ROTARY, profile, some_embedding())
        self.fixed_size = self.codec.fixed_size
        self.takes_references = self.codec.takes_references
        self.takes_tokens = self.codec.takes_tokens

    def num_bytes(self, num_rows: int, position: int) -> int:
        return block_limit(self.codec, num_rows, exact_rows(position, num_rows))

    def advance(self, agree_min: Any) -> bool:
        return False

    def encode(
        self, slots: torch.Tensor, position: int, teaches: bool = False, references: Any = (), tokens: Any = None
    ) -> np.ndarray:
        near = [Reference(block, tuple(Stretch(*part) for part in parts)) for block, parts in references]
        assert (tokens is not None) == self.takes_tokens
        return encode_block(self.codec, 1, slots, position, near, None if tokens is None else as_tokens(tokens))

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
        ids = None if tokens is None else as_tokens(tokens)
        decode_block(self.codec, 1, data, start, stop, slots, position, references, ids)


class CodedHarness(Harness):
    """A cache whose KV lies in a pool of :data:`SOURCE`, since no codec but ``raw`` keeps the harness's own numbers.

    The rows of a token are its own, with noise that depends on the first token of the prompt.
    """

    def __init__(self, name: str):
        super().__init__("plt", slots=SLOTS)
        self.blocks = self.cache.cold.codec = Blocks(name)
        self.cache.cold.codec_changed()
        self.of_token = SOURCE.rows(TOKENS, seed=1)

    def computed(self, tokens: array) -> Any:
        """A pool with what a prompt computes, in the slots of its positions."""
        rows = near(picked(self.of_token, list(tokens)), NOISE, seed=tokens[0])
        return SOURCE.pool(rows, torch.arange(len(tokens)), ROTARY, 0)

    def compute(self, request: Request, end: int) -> None:
        start = request.kv.kv_allocated_len
        super().compute(request, end)
        slots = self.rows.req_to_token[request.kv.req_pool_idx, start:end].long()
        computed = self.computed(request.full_untruncated_fill_ids[:end])
        for target, source in zip(self.buffers(self.blocks.pool), self.buffers(computed), strict=True):
            target[slots] = source[start:end]

    def check_rows(self, request: Request) -> None:
        """Rows come back changed."""

    @staticmethod
    def buffers(pool: Any) -> tuple[torch.Tensor, ...]:
        return (*pool.keys, *pool.values)

    def serve(self, prompt: array = PROMPT) -> tuple[int, int]:
        """One whole request; returns its (device, host) hit."""
        request = Request("r", array("q", prompt))
        hits = self.admit(request)
        self.release(request, checkpoint=True)
        self.check()
        return hits

    def cached_rows(self, prompt: array = PROMPT) -> list[torch.Tensor]:
        """The rows of the prompt as they lie in the pool, all but the last."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        assert match.device_prefix_len == len(prompt)
        slots = self.cache.path_device_indices(match.last_device_node)[: len(prompt) - 1].long()
        return [buffer[slots] for buffer in self.buffers(self.blocks.pool)]

    def forget_rows(self) -> None:
        """Evict everything; what is not restored afterwards would be seen."""
        self.evict(SLOTS)
        self.check()
        for buffer in self.buffers(self.blocks.pool):
            buffer.fill_(torch.nan)
