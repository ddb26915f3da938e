"""Rotary position embedding done and undone in fp32, from the model's own table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Rotary:
    """How a model rotates its keys.

    Attributes:
        cos_sin: ``[positions, rotary_dim]`` float32, SGLang's ``cos_sin_cache``: ``rotary_dim / 2`` cosines, then the
            sines. A magnitude factor in the table (YaRN) is part of the rotation.
        is_neox: pairs are channels ``(j, j + rotary_dim / 2)``; else GPT-J's ``(2j, 2j + 1)``.
        rotary_dim: channels that rotate, the first ones of a head; the rest pass unchanged.

    Raises:
        TypeError: ``cos_sin`` is not float32.
        ValueError: ``cos_sin`` is not ``[positions, rotary_dim]``, ``rotary_dim`` is odd or not positive, or a pair has
            no inverse.
    """

    cos_sin: torch.Tensor
    is_neox: bool
    rotary_dim: int

    def __post_init__(self) -> None:
        if self.cos_sin.dtype != torch.float32:
            raise TypeError(f"Rotary: cos_sin must be float32, got {self.cos_sin.dtype}")
        if self.rotary_dim <= 0 or self.rotary_dim % 2:
            raise ValueError(f"Rotary: rotary_dim must be even and positive, got {self.rotary_dim}")
        if self.cos_sin.ndim != 2 or self.cos_sin.shape[1] != self.rotary_dim:
            raise ValueError(
                f"Rotary: cos_sin must be [positions, {self.rotary_dim}], got shape {tuple(self.cos_sin.shape)}"
            )
        cos, sin = self.cos_sin.chunk(2, dim=1)
        magnitude = cos * cos + sin * sin
        if not bool((magnitude.isfinite() & (magnitude > 0)).all()):
            raise ValueError("Rotary: every (cos, sin) of cos_sin must be finite and not both zero")

    def check_positions(self, position: int, num_rows: int) -> None:
        """Refuse positions outside the table with a ``ValueError``."""
        if position < 0 or position + num_rows > len(self.cos_sin):
            raise ValueError(
                f"Rotary: the table has positions 0..{len(self.cos_sin) - 1}, got {position}..{position + num_rows - 1}"
            )

    def window(self, position: int, num_rows: int) -> np.ndarray:
        """``[num_rows, rotary_dim]`` float32: cosines, then sines, of consecutive positions; a view for a CPU table."""
        return self.cos_sin[position : position + num_rows].cpu().numpy()

    def inverse_table(self, table: np.ndarray) -> np.ndarray:
        """The rows of ``table`` with ``cos`` and ``sin`` each over ``cos**2 + sin**2``: fp64, rounded to fp32 once.

        In NumPy on purpose: a torch operation may wait for its thread pool, longer than the whole encode takes.
        """
        cos, sin = np.split(table.astype(np.float64), 2, axis=1)
        magnitude = cos * cos + sin * sin
        return np.concatenate((cos / magnitude, sin / magnitude), axis=1).astype(np.float32)

    def apply(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` ``[n, heads, dim]`` float32 to ``positions`` int64 ``[n]``; a new tensor.

        A pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``, every product and sum rounded to fp32.
        """
        return self._turn(x, self._rows(positions), 1)

    def undo(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`apply`: ``(a cos + b sin, b cos - a sin)`` cos and sin from :meth:`inverse_table`."""
        table = self.inverse_table(self._rows(positions).cpu().numpy())
        return self._turn(x, torch.from_numpy(table), -1)

    def turn(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` ``[n, heads, dim]`` float32 by the rows of ``table`` ``[n, rotary_dim]``, cosines then sines."""
        return self._turn(x, table, 1)

    def _rows(self, positions: torch.Tensor) -> torch.Tensor:
        return self.cos_sin[positions.to(self.cos_sin.device)]

    def _turn(self, x: torch.Tensor, table: torch.Tensor, direction: int) -> torch.Tensor:
        cos, sin = table.to(x.device).unsqueeze(1).chunk(2, dim=-1)  # [n, 1, rotary_dim/2]
        out = x.clone()
        rotated, half = out[..., : self.rotary_dim], self.rotary_dim // 2
        first = (slice(0, half), slice(half, None)) if self.is_neox else (slice(0, None, 2), slice(1, None, 2))
        a, b = x[..., : self.rotary_dim][..., first[0]], x[..., : self.rotary_dim][..., first[1]]
        if direction > 0:
            rotated[..., first[0]], rotated[..., first[1]] = a * cos - b * sin, b * cos + a * sin
        else:
            rotated[..., first[0]], rotated[..., first[1]] = a * cos + b * sin, b * cos - a * sin
        return out
