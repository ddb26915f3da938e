"""One codec over one server's KV pool, in the terms of the cold tier."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.version import __version__ as sglang_version

from sglang_plt.codec import make_codec
from sglang_plt.codec.base import exact_rows
from sglang_plt.codec.block import block_bytes, decode_block, encode_block, fingerprint
from sglang_plt.host.pool import pool_rows
from sglang_plt.host.rotary import find_rotary

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


class PoolCodec:
    """Implements :class:`sglang_plt.cache.cold_tier.RowCodec` for the pool of ``context``'s model.

    Raises:
        UnsupportedPool: the pool is not one that a codec can read.
        ValueError: the codec does not take the pool's dtype or shape.
    """

    def __init__(self, name: str, pool: KVCache, context: TreeCacheBuildContext):
        rows = pool_rows(pool)
        layout = rows.layout
        model = context.tp_worker.model_runner.model
        rotary = None if name == "raw" else find_rotary(model, layout.head_dim, layout.dtype)
        self._codec = make_codec(name, rows, rotary)
        self._codec.warm_up()
        self._device = rows.device
        self._forward_stream = getattr(context.tp_worker.model_runner, "forward_stream", None)
        self._fingerprint = fingerprint(
            sglang_version,
            context.model_config.model_path,
            context.model_config.hf_config.to_json_string(),
            str(layout),
            context.tp_size,
            context.tp_rank,
        )
        self.lossless = name == "raw"
        self.pool_bytes = layout.row_bytes * pool.size

    def describe(self) -> str:
        """Name, and how keys are stored."""
        keys = "rotated keys" if self._codec.stores_rotated_keys else "keys without RoPE"
        return f"{self._codec.name}/{self._codec.version} ({keys})"

    def num_bytes(self, num_rows: int, position: int) -> int:
        return block_bytes(self._codec, num_rows, exact_rows(position, num_rows))

    def encode(self, slots: torch.Tensor, position: int) -> np.ndarray:
        self._after_forward_pass()
        return encode_block(self._codec, self._fingerprint, slots, position)

    def decode(self, data: np.ndarray, start: int, stop: int, slots: torch.Tensor, position: int) -> None:
        self._after_forward_pass()
        decode_block(self._codec, self._fingerprint, data, start, stop, slots, position)

    def _after_forward_pass(self) -> None:
        """Order our stream behind the forward pass in flight.

        With overlap scheduling a step may still write rows that are about to be read, and one stray row of a request
        that has just finished, into a slot that a restore has been given since.
        """
        if self._device.type == "cuda" and self._forward_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._forward_stream)
