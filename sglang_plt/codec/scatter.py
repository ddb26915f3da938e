"""Decoded rows of a layer into the slots of a pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_plt.codec.base import KINDS, put_rows, slot_indices, to_pool
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows
from triton_ops.paged.cpu_scatter import scatterer


class Scatter:
    """Rotate the keys of float32 rows, cast, and write; by a kernel where there is one, which gives the same bits.

    Args:
        rotary: None where keys come as they are stored.
        kernels: False does without.
    """

    def __init__(self, pool: PoolRows, rotary: Rotary | None, kernels: bool = True) -> None:
        self._pool, self._rotary = pool, rotary
        layout = pool.layout
        self._kernel: Callable | None = None
        if kernels and pool.device.type == "cpu" and layout.dtype in KINDS and layout.v_head_dim:
            rotation = (rotary.rotary_dim, rotary.is_neox) if rotary is not None else (0, True)
            self._kernel = scatterer(KINDS[layout.dtype], layout.head_dim, layout.v_head_dim, *rotation)

    def warm_up(self) -> None:
        """Compile the kernel, for rows of one layer and for those cut out of several layers'."""
        layout = self._pool.layout
        width = layout.kv_heads * (layout.head_dim + layout.v_head_dim)
        if self._kernel is not None:
            for rows in (torch.empty(2, width), torch.empty(2, 2 * width)[:, :width]):
                self._run(self._kernel, 0, rows, torch.empty(0, dtype=torch.int64), 0)

    def __call__(self, layer: int, rows: torch.Tensor, slots: torch.Tensor, position: int, finite: bool) -> None:
        """Write ``rows``, float32 ``[n, kv_heads * (head_dim + v_head_dim)]``, to ``slots``, int64 ``[n]``.

        Args:
            position: of the first row, the others follow.
            finite: no row holds NaN or infinity, for which the kernel is not defined.
        """
        if self._kernel is not None and finite:
            self._run(self._kernel, layer, rows, slots, position)
            return
        layout = self._pool.layout
        width = layout.kv_heads * layout.head_dim
        keys = rows[:, :width].reshape(len(rows), layout.kv_heads, layout.head_dim)
        values = rows[:, width:].reshape(len(rows), layout.kv_heads, layout.v_head_dim)
        if self._rotary is not None:
            keys = self._rotary.apply(keys, torch.arange(position, position + len(slots), device=slots.device))
        for buffer, part in ((self._pool.keys[layer], keys), (self._pool.values[layer], values)):
            put_rows(buffer, slots, to_pool(part, layout.dtype))

    def _run(self, kernel: Callable, layer: int, rows: torch.Tensor, slots: torch.Tensor, position: int) -> None:
        table = np.zeros((1, 1), np.float32) if self._rotary is None else self._rotary.window(position, len(slots))
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        addresses = np.int64(keys.data_ptr()), np.int64(values.data_ptr())
        kernel(rows.numpy(), *addresses, len(keys), slot_indices(slots), table, self._pool.layout.kv_heads)
