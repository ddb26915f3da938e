"""TurboQuant's family: Lloyd-Max codes of randomly rotated head rows, ``triton_ops.rotated``."""

from __future__ import annotations

import math

import torch

from sglang_plt.codec import RowLayout
from sglang_plt.quality.baselines.base import Baseline
from sglang_plt.quality.baselines.statistics import Statistics
from triton_ops import rotated


def quantise(x: torch.Tensor, heads: int, bits: int) -> tuple[torch.Tensor, int]:
    """``x`` ``[n, heads * dim]`` through ``rotated``, and the bits of its norms and codes."""
    rows = x.unflatten(1, (heads, -1))
    norms, codes = rotated.encode(rows, bits)
    decoded = rotated.decode(norms, codes, bits, rows.shape[-1])
    return decoded.flatten(1), 16 * norms.numel() + 8 * codes.numel()


class Rotated(Baseline):
    """TurboQuant (least squared error), arXiv 2504.19874.

    Args:
        rate: bits a code.
        bits: for keys and values of every layer, instead of ``rate`` for all.
    """

    method = "rotated"

    def __init__(self, layout: RowLayout, rate: float, bits: list[tuple[int, int]] | None = None) -> None:
        super().__init__(layout, rate)
        self.bits = bits if bits is not None else [(int(rate), int(rate))] * layout.num_layers

    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        rows, num_bits = [], 0
        for layer, bits in zip(layers, self.bits, strict=True):
            parts = [quantise(x, self.layout.kv_heads, b) for x, b in zip(self._kinds(layer), bits, strict=True)]
            rows.append(torch.cat([part for part, _ in parts], 1))
            num_bits += sum(count for _, count in parts)
        return rows, num_bits


class RotatedFisher(Rotated):
    """The same less the mean of every channel, with more bits where errors weigh more.

    Keys or values of a layer get log2(sensitivity * variance) / 2 bits less a level, 2 to 8.

    Args:
        mean_bits: a code, on average over layers and kinds, as near as whole bits allow; above 2.
    """

    method = "rotated-fisher"

    def __init__(self, statistics: Statistics, mean_bits: float) -> None:
        super().__init__(statistics.layout, mean_bits, allocate(statistics, mean_bits))
        means = [statistics.neighbours(layer)[0] for layer in range(statistics.layout.num_layers)]
        self._means = [mean[-self.width :].float() for mean in means]
        self.profile_bytes = statistics.layout.num_layers * (4 * self.width + 2)

    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        rows, num_bits = super()._through([layer - mean for layer, mean in zip(layers, self._means, strict=True)])
        return [row + mean for row, mean in zip(rows, self._means, strict=True)], num_bits


def allocate(statistics: Statistics, mean_bits: float) -> list[tuple[int, int]]:
    """Whole bits for keys and values of every layer, by one level of weighted distortion."""
    layout = statistics.layout
    weighted = [statistics.mean_sensitivity(part) * statistics.mean_variance(part) for part in statistics.parts]
    wants = [math.log2(square + 1e-300) / 2 for square in weighted]
    dims = (layout.head_dim, layout.v_head_dim)

    def bits_at(level: float) -> list[int]:
        return [min(8, max(2, round(want - level))) for want in wants]

    low, high = min(wants) - 8, max(wants)
    for _ in range(40):
        level = (low + high) / 2
        found = sum(b * dims[i % 2] for i, b in enumerate(bits_at(level))) / (layout.num_layers * sum(dims))
        low, high = (level, high) if found > mean_bits else (low, level)
    bits = bits_at(high)
    return list(zip(bits[::2], bits[1::2], strict=True))
