"""What every baseline promises: a prefix's rows as its method gives them back, and the bits that the method stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sglang_plt.codec import EXACT_TOKENS, RowLayout
from sglang_plt.codec.profile import QuantisedMatrix


class Baseline(ABC):
    """A published method, measured: nothing but its numbers are made, no bytes that could be decoded elsewhere.

    Args:
        layout: of the rows.
        rate: what its name says of its rate, for example bits a code.

    Attributes:
        name: ``<method>@<rate>``.
        profile_bytes: what an encoder and decoder must have at hand, stored as our profiles are.
    """

    method: str

    def __init__(self, layout: RowLayout, rate: float) -> None:
        self.layout = layout
        self.name = f"{self.method}@{rate:g}"
        self.profile_bytes = 0
        self.key_width = layout.kv_heads * layout.head_dim
        self.width = self.key_width + layout.kv_heads * layout.v_head_dim

    def through(self, layers: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Rows of a sequence from its first token on.

        Args:
            layers: float32 ``[n, width]`` each, keys (without rotation) and then values.

        Returns:
            The rows as they come back, the first four bit for bit, and the bits of all of them.
        """
        kept = min(EXACT_TOKENS, len(layers[0]))
        parts, num_bits = self._through([layer[kept:] for layer in layers])
        exact_bits = 8 * self.layout.dtype.itemsize * kept * self.width * len(layers)
        rows = [torch.cat((layer[:kept], part)) for layer, part in zip(layers, parts, strict=True)]
        return rows, num_bits + exact_bits

    @abstractmethod
    def _through(self, layers: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """The same for the rows that are coded, of which there may be none."""

    def _kinds(self, layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer's rows."""
        return layer[:, : self.key_width], layer[:, self.key_width :]


def matrix_bytes(matrix: QuantisedMatrix) -> int:
    """Bytes of a matrix of a profile."""
    return matrix.codes.numel() + 4 * (matrix.rows.numel() + matrix.columns.numel())
