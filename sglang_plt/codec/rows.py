"""What a codec sees of a KV pool: per layer one key and one value buffer, addressed by slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_plt.codec.rope import Rotary

EXACT_TOKENS = 4
"""The first tokens of a sequence (attention sinks) that every codec keeps bit for bit."""


@dataclass(frozen=True)
class RowLayout:
    """Shape of one token's KV: ``num_layers`` keys ``[kv_heads, head_dim]`` and values ``[kv_heads, v_head_dim]``."""

    num_layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's KV in the pool, all layers."""
        return self.num_layers * self.kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class PoolRows:
    """The pool's own buffers, not copies: ``keys[l]`` ``[slots, kv_heads, head_dim]``, ``values[l]`` likewise."""

    layout: RowLayout
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.keys[0].device


def check_pool(pool: PoolRows) -> None:
    """Hold buffers to their layout.

    Raises:
        ValueError: one of them disagrees, or is not contiguous.
    """
    layout = pool.layout
    for name, buffers, dim in (("keys", pool.keys, layout.head_dim), ("values", pool.values, layout.v_head_dim)):
        if len(buffers) != layout.num_layers or layout.num_layers < 1:
            raise ValueError(f"codec: pool.{name} has {len(buffers)} buffers for {layout.num_layers} layers")
        for layer, buffer in enumerate(buffers):
            expected = (len(pool.keys[0]), layout.kv_heads, dim)
            if tuple(buffer.shape) != expected or buffer.dtype != layout.dtype or not buffer.is_contiguous():
                raise ValueError(
                    f"codec: pool.{name}[{layer}] must be contiguous {layout.dtype} {expected}, got "
                    f"{buffer.dtype} {tuple(buffer.shape)} strides {buffer.stride()}"
                )


def layer_rows(pool: PoolRows, rotary: Rotary | None, slots: torch.Tensor, position: int) -> list[torch.Tensor]:
    """Rows of every layer, float32 ``[n, width]``: keys, without their rotation where that is known, then values.

    Args:
        slots: int64 ``[n]``, pool rows of consecutive tokens, on the pool's device.
        position: of the first.
    """
    positions = torch.arange(position, position + len(slots), device=slots.device)
    found = []
    for keys, values in zip(pool.keys, pool.values, strict=True):
        key = keys[slots].float()
        if rotary is not None:
            key = rotary.undo(key, positions)
        found.append(torch.cat((key.flatten(1), values[slots].float().flatten(1)), 1))
    return found
