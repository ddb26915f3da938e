"""The pool's own bytes: bit-exact for every dtype, compresses nothing. The trivial twin of every other codec."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import carray, njit

from sglang_plt.codec.base import Codec, as_bytes, as_tensor, slot_indices
from sglang_plt.codec.layers import Write
from sglang_plt.codec.reference import OpenReference
from triton_ops.int_groups.cpu_scalars import AHEAD, pointer, prefetch_row


@njit(nogil=True, cache=True)
def _copy_rows(payload, at, layer_stride, buffers, row_bytes, num_slots, slots, to_pool):
    """Rows ``slots`` of every buffer to or from ``payload``; torch's index_copy_ is 2-4 times slower on a CPU."""
    for layer in range(len(buffers)):
        rows = carray(pointer(buffers[layer]), num_slots * row_bytes, np.uint8)
        first = at + layer * layer_stride
        for i in range(len(slots)):
            prefetch_row(buffers[layer] + slots[min(i + AHEAD, len(slots) - 1)] * row_bytes, row_bytes)
            inside = payload[first + i * row_bytes : first + (i + 1) * row_bytes]
            outside = rows[slots[i] * row_bytes : (slots[i] + 1) * row_bytes]
            if to_pool:
                for j in range(row_bytes):
                    outside[j] = inside[j]
            else:
                for j in range(row_bytes):
                    inside[j] = outside[j]


class Raw(Codec):
    """``raw/1``: per layer the key rows, then the value rows, as the pool holds them (keys rotated)."""

    name = "raw"
    version = 1
    stores_rotated_keys = True

    def payload_limit(self, num_rows: int, num_exact: int) -> int:
        return num_rows * self.layout.row_bytes

    def _row_bytes(self) -> tuple[int, int]:
        item = self.layout.kv_heads * self.layout.dtype.itemsize
        return self.layout.head_dim * item, self.layout.v_head_dim * item

    def _encode(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        out: np.ndarray,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> int:
        if self._on_cpu:
            self._copy(out, len(slots), 0, slot_indices(slots), False)
            return len(out)
        key_bytes, value_bytes = self._row_bytes()
        target, at = as_tensor(out), 0
        for buffers in zip(self.pool.keys, self.pool.values, strict=True):
            for buffer, row_bytes in zip(buffers, (key_bytes, value_bytes), strict=True):
                rows = buffer.flatten(1).view(torch.uint8).index_select(0, slots.to(buffer.device))
                target[at : at + len(slots) * row_bytes].copy_(as_bytes(rows))
                at += len(slots) * row_bytes
        return len(out)

    def _begin(
        self,
        payload: np.ndarray,
        num_rows: int,
        num_exact: int,
        start: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> Write:
        if self._on_cpu:
            rows = slot_indices(slots)
            return lambda first, stop: self._copy(payload, num_rows, start, rows, True, first, stop)
        where = slots.to(self.pool.device)
        return lambda first, stop: self._put(payload, num_rows, start, where, first, stop)

    def _put(self, payload: np.ndarray, num_rows: int, start: int, slots: torch.Tensor, first: int, stop: int) -> None:
        """Layers ``first .. stop`` by torch, which is what a GPU runs."""
        key_bytes, value_bytes = self._row_bytes()
        source, at = as_tensor(payload), first * num_rows * (key_bytes + value_bytes)
        for buffers in zip(self.pool.keys[first:stop], self.pool.values[first:stop], strict=True):
            for buffer, row_bytes in zip(buffers, (key_bytes, value_bytes), strict=True):
                rows = source[at : at + num_rows * row_bytes].view(num_rows, row_bytes)[start : start + len(slots)]
                buffer.flatten(1).view(torch.uint8).index_copy_(0, slots, rows.to(buffer.device))
                at += num_rows * row_bytes

    def _copy(
        self,
        payload: np.ndarray,
        num_rows: int,
        start: int,
        slots: np.ndarray,
        to_pool: bool,
        first: int = 0,
        stop: int | None = None,
    ) -> None:
        """Layers ``first .. stop``, or all, of the payload's rows from ``start`` on, by the kernel."""
        if not payload.flags.writeable:  # one compiled variant for both directions; decode only reads
            payload = as_tensor(payload).numpy()
        key_bytes, value_bytes = self._row_bytes()
        stride = num_rows * (key_bytes + value_bytes)
        at = first * stride + start * key_bytes
        _copy_rows(payload, at, stride, self._key_buffers[first:stop], key_bytes, self.num_slots, slots, to_pool)
        at = first * stride + num_rows * key_bytes + start * value_bytes
        _copy_rows(payload, at, stride, self._value_buffers[first:stop], value_bytes, self.num_slots, slots, to_pool)
