"""Rows of a KV pool copied to other slots, their keys turned to other positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_plt.codec import PoolRows, Rotary
from sglang_plt.codec.base import KINDS, put_rows, slot_indices, to_pool
from triton_ops.paged.cpu_move import mover


class RowMover:
    """Copies rows within ``pool``.

    A key at position p becomes the key of the same token at position p + shift: one rotation by the difference of both,
    from the model's own table, in fp32. Values, and keys that do not move, keep their bits.

    Args:
        rotary: how the model turns keys; None refuses to shift.
        forward_stream: where forward passes run on a GPU; rows are copied behind the one in flight.
        kernels: False does without; the bits are the same.
    """

    def __init__(self, pool: PoolRows, rotary: Rotary | None, forward_stream: Any = None, kernels: bool = True):
        self._pool = pool
        self._rotary = rotary
        self._forward_stream = forward_stream
        layout = pool.layout
        self._kernel: Callable | None = None
        if kernels and rotary is not None and pool.device.type == "cpu" and layout.dtype in KINDS:
            shape = (layout.head_dim, layout.v_head_dim, rotary.rotary_dim, rotary.is_neox)
            self._kernel = mover(KINDS[layout.dtype], *shape)

    def can_shift(self, position: int, num_rows: int, shift: int) -> bool:
        """Whether rows from ``position`` on can be moved by ``shift``."""
        if not shift:
            return True
        limit = 0 if self._rotary is None else len(self._rotary.cos_sin)
        return max(position, position + shift) + num_rows <= limit

    def warm_up(self) -> None:
        """Compile the kernel."""
        nothing = torch.empty(0, dtype=torch.int64)
        if self._kernel is not None:
            self._run(nothing, nothing, self._table(0, 0, 0))

    def copy(self, source: torch.Tensor, target: torch.Tensor, position: int, shift: int) -> None:
        """Rows of slots ``source`` to slots ``target``, int64 ``[n]`` both, which may be the same.

        Args:
            position: of the first row, the others follow.
            shift: to the position at the new place.
        """
        if self._forward_stream is not None and self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).wait_stream(self._forward_stream)
        table = self._table(position, len(source), shift) if shift else None
        if self._kernel is not None and table is not None:
            self._run(source, target, table)
            return
        for keys, values in zip(self._pool.keys, self._pool.values, strict=True):
            if table is not None:
                assert self._rotary is not None
                turned = self._rotary.turn(keys[source].float(), table.to(keys.device))
                put_rows(keys, target, to_pool(turned, keys.dtype))
            elif source is not target:
                put_rows(keys, target, _rows(keys, source))
            if source is not target:
                put_rows(values, target, _rows(values, source))

    def _run(self, source: torch.Tensor, target: torch.Tensor, table: torch.Tensor) -> None:
        assert self._kernel is not None
        buffers = self._addresses(self._pool.keys), self._addresses(self._pool.values)
        slots = slot_indices(source), slot_indices(target)
        self._kernel(*buffers, len(self._pool.keys[0]), *slots, table.numpy(), self._pool.layout.kv_heads)

    @staticmethod
    def _addresses(buffers: tuple[torch.Tensor, ...]) -> np.ndarray:
        return np.array([buffer.data_ptr() for buffer in buffers], np.int64)

    def deviation(self, one: torch.Tensor, other: torch.Tensor) -> float:
        """Squared distance of rows over the squared length of the ``other`` ones; mean of layers, keys and values."""
        shares = []
        for buffer in (*self._pool.keys, *self._pool.values):
            ours, theirs = _rows(buffer, one).float(), _rows(buffer, other).float()
            shares.append(float((ours - theirs).square().sum() / theirs.square().sum().clamp_min(1e-30)))
        return float(np.mean(shares))

    def _table(self, position: int, num_rows: int, shift: int) -> torch.Tensor:
        """The rotation from ``position`` to ``position + shift`` for every row, like rows of the model's table."""
        assert self._rotary is not None
        rotary = self._rotary
        back: np.ndarray = rotary.inverse_table(rotary.window(position, num_rows)).astype(np.float64)
        there: np.ndarray = rotary.window(position + shift, num_rows).astype(np.float64)
        (c, s), (cos, sin) = np.split(back, 2, axis=1), np.split(there, 2, axis=1)
        table = np.concatenate((cos * c + sin * s, sin * c - cos * s), axis=1).astype(np.float32)
        return torch.from_numpy(table)


def _rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return (buffer.view(torch.uint8)[slots].view(buffer.dtype)) if buffer.dtype.itemsize == 1 else buffer[slots]
