"""Small pools and rotary tables for the codec tests."""

from __future__ import annotations

import torch

from sglang_plt.codec import PoolRows, Rotary, RowLayout

NUM_SLOTS = 400
NAN = float("nan")


def make_pool(
    dtype: torch.dtype = torch.float32,
    heads: int = 3,
    dim: int = 64,
    v_dim: int | None = None,
    layers: int = 2,
    fill: float | None = None,
    device: torch.device | str = "cpu",
) -> PoolRows:
    """A pool of normal values whose key channels differ in size, or one full of ``fill``."""
    v_dim = dim if v_dim is None else v_dim
    generator = torch.Generator().manual_seed(0)

    def buffer(last: int) -> torch.Tensor:
        if fill is not None:
            return torch.full((NUM_SLOTS, heads, last), fill).to(dtype).to(device)
        rows = torch.randn(NUM_SLOTS, heads, last, generator=generator)
        return (rows * torch.linspace(0.1, 4, last) + torch.linspace(-3, 1, last)).to(dtype).to(device)

    keys = tuple(buffer(dim) for _ in range(layers))
    values = tuple(buffer(v_dim) for _ in range(layers))
    return PoolRows(RowLayout(layers, heads, dim, v_dim, dtype), keys, values)


def make_rotary(rotary_dim: int = 64, is_neox: bool = True, positions: int = 1024, magnitude: float = 1.0) -> Rotary:
    """SGLang's table for base 10,000; ``magnitude`` scales it the way YaRN does."""
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return Rotary((torch.cat((angles.cos(), angles.sin()), 1) * magnitude).float(), is_neox, rotary_dim)


def some_slots(num_rows: int, seed: int = 1) -> torch.Tensor:
    """Scattered, unordered slots."""
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))[:num_rows]


def all_bytes(pool: PoolRows) -> torch.Tensor:
    """Every byte of the pool: equal bytes is the only equality that NaN passes."""
    return torch.cat([buffer.cpu().reshape(-1).view(torch.uint8) for buffer in pool.keys + pool.values])
