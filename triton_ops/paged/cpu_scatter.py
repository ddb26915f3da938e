"""CPU kernel: float32 rows of a layer to the slots of its pool, keys rotated and cast on the way.

Bit for bit :func:`triton_ops.rope.reference.apply` and :func:`triton_ops.paged.reference.to_pool` for finite rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import njit

from triton_ops.int_groups.cpu_scalars import (
    AHEAD,
    BFLOAT16,
    FLOAT32,
    buffer_views,
    float_to_bfloat,
    float_to_half,
    prefetch_row,
)


@cache
def scatterer(kind: int, dim: int, v_dim: int, rotary_dim: int, is_neox: bool) -> Callable:
    """The kernel for one shape, compiled at its first call.

    The kernel is ``scatter(rows, key_buffer, value_buffer, num_slots, slots, table, heads)``: ``rows`` float32
    ``[n, heads * (dim + v_dim)]``, keys first, C-contiguous along a row; addresses of contiguous buffers of
    ``num_slots`` rows; int64 ``slots`` ``[n]``; ``table`` float32 ``[n, rotary_dim]``, cosines then sines, or anything
    where nothing rotates. The caller has checked every bound.
    """
    item, half = (4 if kind == FLOAT32 else 2), rotary_dim // 2
    step, other = (1, half) if is_neox else (2, 1)

    @njit(nogil=True, cache=True)
    def scatter(rows, key_buffer, value_buffer, num_slots, slots, table, heads):
        width, v_width = heads * dim, heads * v_dim
        _, keys16, keys32 = buffer_views(key_buffer, num_slots * width * item)
        _, values16, values32 = buffer_views(value_buffer, num_slots * v_width * item)
        turned: np.ndarray = np.empty(width, np.float32)
        for i in range(len(slots)):
            ahead = slots[min(i + AHEAD, len(slots) - 1)]
            prefetch_row(key_buffer + ahead * width * item, width * item)
            prefetch_row(value_buffer + ahead * v_width * item, v_width * item)
            turned[:] = rows[i, :width]
            if rotary_dim > 0:
                for head in range(heads):
                    at = head * dim
                    for j in range(half):
                        a, b = turned[at + step * j], turned[at + step * j + other]
                        turned[at + step * j] = a * table[i, j] - b * table[i, half + j]
                        turned[at + step * j + other] = b * table[i, j] + a * table[i, half + j]
            at, v_at = slots[i] * width, slots[i] * v_width
            if kind == FLOAT32:
                keys32[at : at + width] = turned
                values32[v_at : v_at + v_width] = rows[i, width:]
            elif kind == BFLOAT16:
                for j in range(width):
                    keys16[at + j] = float_to_bfloat(turned[j])
                for j in range(v_width):
                    values16[v_at + j] = float_to_bfloat(rows[i, width + j])
            else:
                for j in range(width):
                    keys16[at + j] = float_to_half(turned[j])
                for j in range(v_width):
                    values16[v_at + j] = float_to_half(rows[i, width + j])

    return scatter
