"""Coded rows of ``dense`` and ``fast`` into the pool, unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_plt.codec.base import put_rows
from sglang_plt.codec.coded import HEAD, CodedRows, unit_components
from sglang_plt.codec.packing import Packing
from sglang_plt.codec.rows import PoolRows
from sglang_plt.codec.scatter import Scatter
from sglang_plt.codec.transform import Unit


class UnitWriter:
    """Rebuilds rows from their components; every unit is predicted from the last layer of the one below.

    Args:
        coded: checked; ``opened`` are the reference blocks that it names.
        first, last: half-open range of its rows.
        slots: int64 ``[last - first]``, on the pool's device.
        position: of row ``first`` at its new place.
        features: of the tokens of these rows, where they are predicted from them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        packing: Packing,
        scatter: Scatter,
        device: torch.device,
        coded: CodedRows,
        opened: Sequence[CodedRows],
        first: int,
        last: int,
        slots: torch.Tensor,
        position: int,
        features: torch.Tensor | None = None,
    ) -> None:
        self._units, self._packing, self._scatter, self._device = units, packing, scatter, device
        self._coded, self._opened, self._first, self._last = coded, opened, first, last
        self._slots, self._position, self._features = slots, position, features
        self._inside = (coded.escaped >= first) & (coded.escaped < last)
        self._escapes = bool(self._inside.any())
        self._number = 0
        self._below: torch.Tensor | None = None

    def write_to(self, stop: int) -> None:
        """Write the units that begin below layer ``stop`` and are not written yet."""
        while self._number < len(self._units) and self._units[self._number].layers.start < stop:
            self._write(self._number, self._units[self._number])
            self._number += 1

    def _write(self, number: int, unit: Unit) -> None:
        kept, used = unit_components(
            self._coded, self._opened, number, self._first, self._last, self._packing, len(unit.bias), self._device
        )
        row = unit.synthesise(unit.predict(self._below, self._features), kept, used)
        width = row.shape[1] // len(unit.layers)
        for part, layer in zip(row.split(width, 1), unit.layers, strict=True):
            if self._escapes:
                part = self._with_escaped(layer, part)
            self._scatter(layer, part, self._slots, self._position, finite=not self._escapes)
        self._below = row[:, -width:]

    def _with_escaped(self, layer: int, part: torch.Tensor) -> torch.Tensor:
        assert self._coded.exceptions is not None
        part = part.clone()
        exceptions = torch.from_numpy(self._coded.exceptions[layer][self._inside])
        where = torch.from_numpy(self._coded.escaped[self._inside] - self._first)
        part[where.to(part.device)] = exceptions.to(part.device)
        return part


def write_exact(
    pool: PoolRows, payload: np.ndarray, num_exact: int, start: int, slots: torch.Tensor, first: int, stop: int
) -> None:
    """Write the exact rows that are wanted, of the layers ``first .. stop``.

    Args:
        start: row of the payload that goes to the first of ``slots``.
    """
    count = max(0, min(num_exact - start, len(slots)))
    if not count:
        return
    at = HEAD.size + first * num_exact * pool.layout.row_bytes // pool.layout.num_layers
    for buffers in zip(pool.keys[first:stop], pool.values[first:stop], strict=True):
        for buffer in buffers:
            row_bytes = buffer[0].numel() * buffer.element_size()
            if row_bytes:
                section = payload[at + start * row_bytes : at + (start + count) * row_bytes].copy()
                rows = torch.from_numpy(section).view(buffer.dtype).view(count, *buffer.shape[1:])
                put_rows(buffer, slots[:count], rows.to(buffer.device))
            at += num_exact * row_bytes
