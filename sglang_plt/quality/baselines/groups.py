"""Asymmetric integer groups with a float16 low and scale each."""

from __future__ import annotations

import torch

from sglang_plt.codec import RowLayout
from sglang_plt.quality.baselines.base import Baseline

GROUP = 64
_PARAMETER_BITS = 32


def quantise(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, int]:
    """``x`` ``[n, width]`` in groups of up to 64 numbers along ``dim``, and the bits of codes, lows and scales."""
    parts, num_bits = [], 0
    for group in x.split(GROUP, dim):
        if not group.numel():
            parts.append(group)
            continue
        low = group.amin(dim, keepdim=True).half().float()
        scale = ((group.amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float()
        codes = ((group - low) / scale.clamp_min(1e-12)).round().clamp(0, 2**bits - 1)
        parts.append(codes * scale + low)
        num_bits += bits * group.numel() + _PARAMETER_BITS * low.numel()
    return torch.cat(parts, dim), num_bits


class IntPerToken(Baseline):
    """Keys and values in groups of 64 channels of one token, ``bits`` a code."""

    method = "int"
    key_dim = 1

    def __init__(self, layout: RowLayout, bits: int) -> None:
        super().__init__(layout, bits)
        self.bits = bits

    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        rows, num_bits = [], 0
        for layer in layers:
            keys, values = self._kinds(layer)
            keys, key_bits = quantise(keys, self.bits, self.key_dim)
            values, value_bits = quantise(values, self.bits, 1)
            rows.append(torch.cat((keys, values), 1))
            num_bits += key_bits + value_bits
        return rows, num_bits


class Kivi(IntPerToken):
    """KIVI, arXiv 2402.02750: keys in groups of 64 tokens of one channel, values as above; no recent tokens apart."""

    method = "kivi"
    key_dim = 0
