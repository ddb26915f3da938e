"""CPU kernel: rows of a pool to other slots of it, their keys turned by a rotation each.

Bit for bit what :func:`triton_ops.paged.reference.to_float`, :func:`triton_ops.rope.reference.apply` and
:func:`triton_ops.paged.reference.to_pool` give for finite rows.
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
    float_of,
    float_to_bfloat,
    float_to_half,
    half_to_float,
    prefetch_row,
)


@njit
def _bfloat_to_float(bits):
    return float_of(np.int32(np.int32(bits) << np.int32(16)))


@cache
def mover(kind: int, dim: int, v_dim: int, rotary_dim: int, is_neox: bool) -> Callable:
    """The kernel for one shape, compiled at its first call.

    The kernel is ``move(key_buffers, value_buffers, num_slots, source, target, table, heads)``: addresses of contiguous
    buffers of ``num_slots`` rows, int64 ``[layers]``; int64 slots ``[n]``, equal or disjoint; ``table`` float32
    ``[n, rotary_dim]``, cosines then sines. Values are copied. The caller has checked every bound.
    """
    item, half = (4 if kind == FLOAT32 else 2), rotary_dim // 2
    step, other = (1, half) if is_neox else (2, 1)

    @njit(nogil=True, cache=True)
    def move(key_buffers, value_buffers, num_slots, source, target, table, heads):
        width, v_width = heads * dim, heads * v_dim
        x: np.ndarray = np.empty(width, np.float32)
        for layer in range(len(key_buffers)):
            _, keys16, keys32 = buffer_views(key_buffers[layer], num_slots * width * item)
            values8, _, _ = buffer_views(value_buffers[layer], num_slots * v_width * item)
            for i in range(len(source)):
                ahead = min(i + AHEAD, len(source) - 1)
                prefetch_row(key_buffers[layer] + source[ahead] * width * item, width * item)
                prefetch_row(value_buffers[layer] + source[ahead] * v_width * item, v_width * item)
                at, to = source[i] * width, target[i] * width
                if kind == FLOAT32:
                    x[:] = keys32[at : at + width]
                elif kind == BFLOAT16:
                    for j in range(width):
                        x[j] = _bfloat_to_float(keys16[at + j])
                else:
                    for j in range(width):
                        x[j] = half_to_float(keys16[at + j])
                for head in range(heads):
                    first = head * dim
                    for j in range(half):
                        a, b = x[first + step * j], x[first + step * j + other]
                        x[first + step * j] = a * table[i, j] - b * table[i, half + j]
                        x[first + step * j + other] = b * table[i, j] + a * table[i, half + j]
                if kind == FLOAT32:
                    keys32[to : to + width] = x
                elif kind == BFLOAT16:
                    for j in range(width):
                        keys16[to + j] = float_to_bfloat(x[j])
                else:
                    for j in range(width):
                        keys16[to + j] = float_to_half(x[j])
                at, to = source[i] * v_width * item, target[i] * v_width * item
                if at != to:
                    values8[to : to + v_width * item] = values8[at : at + v_width * item]

    return move
