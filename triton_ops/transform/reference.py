"""Rows of a unit from its components: the plain-torch specification of :mod:`triton_ops.transform.kernel`.

    row = bias + below @ weights + scale * (components @ basis)

in fp32; the order of sums is free. A row is, layer after layer of the unit, keys by head and channel without rotation,
then values. Keys are turned to their new positions, and all is cast to the pool's type.

Source: FORMAT.md, payload of ``fast`` and ``dense``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triton_ops.paged import PagedPool
from triton_ops.paged.reference import to_pool
from triton_ops.rope.reference import Rotation, apply


@dataclass(frozen=True)
class Unit:
    """A unit's matrices, float32, contiguous, on one device.

    Attributes:
        basis: ``[components, width]``.
        weights: ``[width below, width]``, or None where nothing is predicted.
        bias: ``[width]``.

    Raises:
        ValueError, TypeError: they are not as above.
    """

    basis: torch.Tensor
    weights: torch.Tensor | None
    bias: torch.Tensor

    def __post_init__(self) -> None:
        width = len(self.bias)
        for name, matrix in (("basis", self.basis), ("weights", self.weights)):
            if matrix is None:
                continue
            if matrix.dtype != torch.float32:
                raise TypeError(f"Unit: {name} must be float32, got {matrix.dtype}")
            if matrix.ndim != 2 or matrix.shape[1] != width or not matrix.is_contiguous():
                raise ValueError(f"Unit: {name} must be contiguous [n, {width}], got {tuple(matrix.shape)}")


def synthesise(components: torch.Tensor, scale: float, below: torch.Tensor | None, unit: Unit) -> torch.Tensor:
    """Rows ``[n, width]`` from ``components`` ``[n, components]`` and ``below`` ``[n, width below]``; float32."""
    row = unit.bias + scale * (components @ unit.basis)
    return row if below is None or unit.weights is None else row + below @ unit.weights


def scatter(
    row: torch.Tensor,
    first_layer: int,
    keys: PagedPool,
    values: PagedPool | None,
    slots: torch.Tensor,
    position: int,
    rotation: Rotation | None,
) -> None:
    """Write the layers of ``row`` float32 ``[n, width]``, consecutive tokens from ``position`` on, to ``slots``.

    ``values`` is None for latent rows.
    """
    k = keys.heads * keys.dim
    v = 0 if values is None else values.heads * values.dim
    positions = torch.arange(position, position + len(slots), device=slots.device)
    for layer, part in enumerate(row.split(k + v, 1), first_layer):
        key = part[:, :k].reshape(-1, keys.heads, keys.dim)
        key = key if rotation is None else apply(rotation, key, positions)
        keys.scatter(layer, slots, to_pool(key, keys.dtype))
        if values is not None:
            values.scatter(layer, slots, to_pool(part[:, k:].reshape(-1, values.heads, values.dim), values.dtype))
