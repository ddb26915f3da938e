"""What baselines are fitted from: the same pass over calibration text as our profiles, in groups of 6 layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_plt.calibration.moments import Moments
from sglang_plt.calibration.sensitivity import Fisher
from sglang_plt.codec import RowLayout

GROUP = 6
"""Layers of a unit of the moments; those of 1, 2 or 3 neighbours, and of the layer below them, are in it."""

Part = tuple[int, str]
"""A layer and ``keys`` or ``values``."""


@dataclass(frozen=True)
class Statistics:
    """Second moments, in units of a multiple of what is fitted, and sensitivities."""

    layout: RowLayout
    moments: Moments
    fisher: Fisher

    @property
    def parts(self) -> list[Part]:
        """Keys and values of every layer."""
        return [(layer, kind) for layer in range(self.layout.num_layers) for kind in ("keys", "values")]

    def columns(self, kind: str, num_layers: int = 1) -> torch.Tensor:
        """Where the keys or values of ``num_layers`` layers lie in rows of these layers."""
        width, key_width = self.moments.width, self.layout.kv_heads * self.layout.head_dim
        inside = torch.arange(key_width) if kind == "keys" else torch.arange(key_width, width)
        return torch.cat([inside + width * layer for layer in range(num_layers)])

    def neighbours(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of rows of the layer below, where there is one, and of ``layer``; float64."""
        moments, width = self.moments, self.moments.width
        unit, sums = next((u, s) for u, s in zip(moments.units, moments.sums, strict=True) if layer in u)
        first, hidden = max(unit.start - 1, 0), moments.hidden_of(unit)
        # the layer whose channels come first in the sums, behind those of the tokens
        inside = slice(hidden + (max(layer - 1, 0) - first) * width, hidden + (layer + 1 - first) * width)
        mean = sums[-1, inside] / moments.count
        return mean, sums[inside, inside] / moments.count - torch.outer(mean, mean)

    def mean_variance(self, part: Part) -> float:
        """Of the channels of a layer's keys or values."""
        variances = self.neighbours(part[0])[1].diagonal()[-self.moments.width :]
        return float(variances[self.columns(part[1])].mean())

    def mean_sensitivity(self, part: Part) -> float:
        """Mean Fisher information of the numbers of a layer's keys or values, over continuation tokens."""
        layer, kind = part
        sums = self.fisher.keys if kind == "keys" else self.fisher.values
        return float(sums[layer].diagonal().mean()) / self.fisher.tokens
