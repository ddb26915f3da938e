"""Second moments of a unit's rows and of the rows below it: all that a fit needs, and nothing that spells a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_plt.codec.profile import unit_layers


class Moments:
    """Sums over rows of ``x^T x`` with ``x = [row of the layer below the unit, rows of its layers, 1]``, one a unit.

    Args:
        num_layers: layers of the model.
        width: channels of one layer's row, ``kv_heads * (head_dim + v_head_dim)``.
        group: layers of a unit.

    Attributes:
        count: rows that were added.
        sums: float64 ``[n, n]`` a unit, ``n = width * (1 + layers) + 1``, without ``width`` for the first unit.
    """

    def __init__(self, num_layers: int, width: int, group: int = 1) -> None:
        self.width = width
        self.count = 0
        self.units = unit_layers(num_layers, group)
        sizes = [width * (bool(unit.start) + len(unit)) + 1 for unit in self.units]
        self.sums = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]

    @staticmethod
    def num_bytes(num_layers: int, width: int, group: int = 1) -> int:
        """Memory that the moments of such a model take."""
        units = unit_layers(num_layers, group)
        return sum(8 * (width * (bool(unit.start) + len(unit)) + 1) ** 2 for unit in units)

    def add(self, rows: Sequence[torch.Tensor]) -> None:
        """Add rows of the same tokens in every layer, float32 ``[n, width]`` each; rows with NaN or inf are skipped."""
        finite = torch.stack([layer.isfinite().all(1) for layer in rows]).all(0)
        one = torch.ones(int(finite.sum()), 1, device=rows[0].device)
        if not len(one):
            return
        for unit, sums in zip(self.units, self.sums, strict=True):
            first = max(unit.start - 1, 0)
            x = torch.cat([*(layer[finite] for layer in rows[first : unit.stop]), one], 1)
            mean = x.mean(0)
            x = x - mean  # float32 products of channels with a large mean would lose their variance
            mean, rest = mean.double().cpu(), x.sum(0, dtype=torch.float64).cpu()
            rest += len(one) / 2 * mean
            sums += (x.T @ x).double().cpu()
            sums.addr_(mean, rest).addr_(rest, mean)
        self.count += len(one)

    def covariances(self, layers: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of neighbouring ``layers`` that lie in one unit, and of the layer below them; float64.

        Returns:
            ``(mean below, mean, cov(below), cov(below, layers), cov(layers))``, empty below layer 0.

        Raises:
            ValueError: no unit holds all of ``layers``, or fewer than two rows were added.
        """
        if self.count < 2:
            raise ValueError(f"moments: {self.count} rows are too few")
        held = [number for number, unit in enumerate(self.units) if layers.start in unit and layers.stop - 1 in unit]
        if not held:
            raise ValueError(f"moments: no unit holds layers {layers.start} to {layers.stop - 1}")
        unit, sums = self.units[held[0]], self.sums[held[0]]
        first = max(unit.start - 1, 0)  # the layer whose channels come first in the sums
        below = slice((max(layers.start - 1, 0) - first) * self.width, (layers.start - first) * self.width)
        inside = slice((layers.start - first) * self.width, (layers.stop - first) * self.width)
        mean, moment = sums[-1] / self.count, sums / self.count
        covariance = moment - torch.outer(mean, mean)
        return (
            mean[below],
            mean[inside],
            covariance[below, below],
            covariance[below, inside],
            covariance[inside, inside],
        )
