"""Rotary position embedding done and undone: the plain-torch specification of :mod:`triton_ops.rope.kernel`.

A pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``, and back ``(a c + b s, b c - a s)`` with c and s each over
``cos**2 + sin**2``, computed in fp64 and rounded to fp32 once. Every product and sum is rounded to fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Rotation:
    """How a model turns its keys.

    Attributes:
        cos_sin: float32 ``[positions, rotary_dim]``: ``rotary_dim / 2`` cosines, then the sines; on the pool's device.
        is_neox: pairs are channels ``(j, j + rotary_dim / 2)``; else GPT-J's ``(2j, 2j + 1)``. Channels from
            ``rotary_dim`` on do not turn.

    Raises:
        TypeError, ValueError: ``cos_sin`` is not as above, or ``rotary_dim`` is odd or 0.
    """

    cos_sin: torch.Tensor
    is_neox: bool = True

    def __post_init__(self) -> None:
        if self.cos_sin.dtype != torch.float32:
            raise TypeError(f"Rotation: cos_sin must be float32, got {self.cos_sin.dtype}")
        if self.cos_sin.ndim != 2 or self.rotary_dim % 2 or not self.rotary_dim or not self.cos_sin.is_contiguous():
            raise ValueError(
                f"Rotation: cos_sin must be contiguous [positions, an even number], got {tuple(self.cos_sin.shape)}"
            )

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]

    @cached_property
    def inverse(self) -> torch.Tensor:
        """float32 ``[positions, rotary_dim]``: the cosines and sines that undo those of ``cos_sin``."""
        cos, sin = self.cos_sin.double().chunk(2, 1)
        magnitude = cos * cos + sin * sin
        return torch.cat((cos / magnitude, sin / magnitude), 1).float()


def apply(rotation: Rotation, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn ``x`` float32 ``[n, heads, dim]`` to ``positions`` int64 ``[n]``; a new tensor."""
    return _turn(rotation, rotation.cos_sin[positions], x, 1.0)


def undo(rotation: Rotation, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`apply`, up to fp32 rounding."""
    return _turn(rotation, rotation.inverse[positions], x, -1.0)


def _turn(rotation: Rotation, table: torch.Tensor, x: torch.Tensor, direction: float) -> torch.Tensor:
    cos, sin = table.unsqueeze(1).chunk(2, -1)  # [n, 1, rotary_dim/2]
    sin = sin * direction  # exact
    half = rotation.rotary_dim // 2
    first = slice(0, half) if rotation.is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if rotation.is_neox else slice(1, 2 * half, 2)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out
