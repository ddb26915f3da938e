"""Second moments of rows and of what they are predicted from: all that a fit needs, nothing that spells a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_plt.codec.profile import unit_layers


class Moments:
    """Sums over rows of ``x^T x`` with ``x = [token features, row of the layer below, rows of the unit's layers, 1]``.

    Args:
        num_layers: layers of the model.
        width: channels of one layer's row, ``kv_heads * (head_dim + v_head_dim)``.
        group: layers of a unit.
        hidden: channels of the token features, see :class:`sglang_plt.codec.TokenEmbedding`.
        token_layers: units that begin below this layer take the features in.

    Attributes:
        count: rows that were added.
        sums: float64 ``[n, n]`` a unit, ``n = hidden + width * (1 + layers) + 1``, without ``width`` for the first unit
            and without ``hidden`` for those behind ``token_layers``.
    """

    def __init__(self, num_layers: int, width: int, group: int = 1, hidden: int = 0, token_layers: int = 0) -> None:
        self.width, self.hidden, self._token_layers = width, hidden, token_layers
        self.count = 0
        self.units = unit_layers(num_layers, group)
        sizes = _sizes(num_layers, width, group, hidden, token_layers)
        self.sums = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]

    def hidden_of(self, unit: range) -> int:
        """Channels of token features in front of those of the layer below ``unit``, one of :attr:`units`."""
        return self.hidden if unit.start < self._token_layers else 0

    @staticmethod
    def num_bytes(num_layers: int, width: int, group: int = 1, hidden: int = 0, token_layers: int = 0) -> int:
        """Memory that the moments of such a model take."""
        return sum(8 * size**2 for size in _sizes(num_layers, width, group, hidden, token_layers))

    def add(self, rows: Sequence[torch.Tensor], features: torch.Tensor | None = None) -> None:
        """Add rows of the same tokens in every layer, float32 ``[n, width]`` each; rows with NaN or inf are skipped.

        Args:
            features: of the tokens, float32 ``[n, hidden]``; needed where ``hidden`` is not 0.
        """
        finite = torch.stack([layer.isfinite().all(1) for layer in rows]).all(0)
        one = torch.ones(int(finite.sum()), 1, device=rows[0].device)
        if not len(one):
            return
        for unit, sums in zip(self.units, self.sums, strict=True):
            first = max(unit.start - 1, 0)
            parts = [*(layer[finite] for layer in rows[first : unit.stop]), one]
            if self.hidden_of(unit):
                assert features is not None
                parts.insert(0, features[finite])
            x = torch.cat(parts, 1)
            mean = x.mean(0)
            x = x - mean  # float32 products of channels with a large mean would lose their variance
            mean, rest = mean.double().cpu(), x.sum(0, dtype=torch.float64).cpu()
            rest += len(one) / 2 * mean
            sums += (x.T @ x).double().cpu()
            sums.addr_(mean, rest).addr_(rest, mean)
        self.count += len(one)

    def covariances(
        self, layers: range, tokens: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of neighbouring ``layers`` that lie in one unit, and of the layer below them; float64.

        Args:
            tokens: whether token features, where the unit has them, stand in front of the layer below.

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
        first, hidden = max(unit.start - 1, 0), self.hidden_of(unit)  # the layer whose channels come first in the sums
        below = torch.arange((max(layers.start - 1, 0) - first) * self.width, (layers.start - first) * self.width)
        below = torch.cat((torch.arange(hidden if tokens else 0), hidden + below))
        inside = hidden + torch.arange((layers.start - first) * self.width, (layers.stop - first) * self.width)
        mean = sums[-1] / self.count
        x, y = mean[below], mean[inside]
        return (
            x,
            y,
            sums[below][:, below] / self.count - torch.outer(x, x),
            sums[below][:, inside] / self.count - torch.outer(x, y),
            sums[inside][:, inside] / self.count - torch.outer(y, y),
        )


def _sizes(num_layers: int, width: int, group: int, hidden: int, token_layers: int) -> list[int]:
    """Numbers in ``x`` of every unit."""
    return [
        hidden * (unit.start < token_layers) + width * (bool(unit.start) + len(unit)) + 1
        for unit in unit_layers(num_layers, group)
    ]
