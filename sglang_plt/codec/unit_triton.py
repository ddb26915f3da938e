"""Coded rows into the pool by Triton kernels: one launch a unit and kind predicts, transforms, rotates and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_plt.codec.coded import unit_components
from sglang_plt.codec.kernel_pool import KernelPool
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows
from sglang_plt.codec.transform import Unit
from sglang_plt.codec.unit_writer import UnitWriter
from triton_ops.band_codes import Bands
from triton_ops.band_codes.kernel import to_components, upload
from triton_ops.transform import reference
from triton_ops.transform.kernel import restore_unit


class UnitKernels:
    """What the kernels of one codec share: its pool, and the matrices of its units; raises what ``KernelPool`` does."""

    def __init__(self, pool: PoolRows, rotary: Rotary | None, units: Sequence[Unit]) -> None:
        self.pool = KernelPool(pool, rotary)
        self._units = units
        self._made: dict[tuple[int, bool], reference.Unit] = {}

    def unit(self, number: int, with_tokens: bool) -> reference.Unit:
        """The matrices of a unit, those of the tokens' features in front of those of the layer below."""
        unit = self._units[number]
        with_tokens &= len(unit.of_tokens) > 0
        if (number, with_tokens) not in self._made:
            weights = torch.cat((unit.of_tokens, unit.weights)) if with_tokens else unit.weights
            made = reference.Unit(unit.basis, weights if len(weights) else None, unit.bias)
            self._made[number, with_tokens] = made
        return self._made[number, with_tokens]


class TritonUnitWriter(UnitWriter):
    """A :class:`UnitWriter` whose rows never leave the device.

    Args:
        kernels: of the codec.
    """

    def __init__(self, kernels: UnitKernels, *args: Any) -> None:
        super().__init__(*args)
        self._kernels = kernels

    def _write(self, number: int, unit: Unit) -> None:
        components, scale = self._components(number, len(unit.bias))
        inputs = []
        if self._features is not None and len(unit.of_tokens):
            inputs.append(self._features)
        if self._below is not None and len(unit.weights):
            inputs.append(self._below)
        below = torch.cat(inputs, 1).contiguous() if inputs else None
        rows = torch.empty(len(components), len(unit.bias), device=self._device)
        kernels = self._kernels
        restore_unit(
            components,
            scale,
            below,
            kernels.unit(number, self._features is not None),
            unit.layers.start,
            *kernels.pool.layers(),
            self._slots.contiguous(),
            self._position,
            kernels.pool.rotation,
            rows,
        )
        width = rows.shape[1] // len(unit.layers)
        for part, layer in zip(rows.split(width, 1), unit.layers, strict=True):
            if self._escapes:
                self._write_escaped(layer, self._with_escaped(layer, part))
        self._below = rows[:, -width:].contiguous()

    def _components(self, number: int, width: int) -> tuple[torch.Tensor, float]:
        """Components of all rows, contiguous, and what they are to be multiplied with."""
        coded = self._coded
        if coded.sources is None and isinstance(coded.own[number], Bands):
            found = to_components(upload(coded.own[number], self._device), self._first, self._last)
            return found[:, :width].contiguous(), coded.scale
        kept, used = unit_components(
            coded, self._opened, number, self._first, self._last, self._packing, width, self._device
        )
        found = torch.zeros(len(kept), width, device=self._device)
        inside = used < width
        found[:, used[inside]] = kept[:, inside]
        return found, 1.0

    def _write_escaped(self, layer: int, rows: torch.Tensor) -> None:
        for row in (self._coded.escaped[self._inside] - self._first).tolist():
            part = slice(row, row + 1)
            self._scatter(layer, rows[part], self._slots[part], self._position + row, finite=False)
