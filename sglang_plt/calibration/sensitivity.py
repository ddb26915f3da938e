"""How much next-token distributions mind errors in KV rows: the Fisher information of rows, summed over a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FLOOR = 0.3
"""Share of the mean sensitivity that every direction gets: a few thousand sampled tokens see no direction exactly."""


class Fisher:
    """Sums of ``g^T g`` over prefix rows, with ``g`` the gradient of sampled tokens' log-probability; a layer and kind.

    KL(p(x) || p(x + e)) is 1/2 e^T F e to second order, with F the expectation of ``g^T g`` when tokens are drawn from
    the model itself.

    Attributes:
        tokens: continuation tokens behind the sums.
        keys, values: float64 ``[layers, width of the kind, same]``.
    """

    def __init__(self, num_layers: int, key_width: int, value_width: int) -> None:
        self.tokens = 0
        self.keys = torch.zeros(num_layers, key_width, key_width, dtype=torch.float64)
        self.values = torch.zeros(num_layers, value_width, value_width, dtype=torch.float64)

    def add(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], tokens: int) -> None:
        """Add gradients of the summed log-probability of ``tokens`` tokens, ``[rows, width]`` a layer."""
        for sums, gradients in ((self.keys, keys), (self.values, values)):
            for total, gradient in zip(sums, gradients, strict=True):
                total += (gradient.T @ gradient).double()
        self.tokens += tokens

    def of_layers(self, layers: Sequence[int]) -> torch.Tensor:
        """Fisher information of a unit's rows, block-diagonal float64: keys and values of every layer in turn.

        Raises:
            ValueError: no tokens were added.
        """
        if not self.tokens:
            raise ValueError("fisher: no tokens were added")
        blocks = []
        for layer in layers:
            for sums in (self.keys, self.values):
                matrix = sums[layer] / self.tokens
                blocks.append(matrix + _FLOOR * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64))
        return torch.block_diag(*blocks)
