"""CPU kernel: one encoded payload to pool rows, fused unpack + dequantise + RoPE + cast + scatter."""

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
    half_to_float,
    prefetch_row,
)
from triton_ops.int_groups.reference import GROUP


@njit(inline="always")
def _dequantise_row(codes, bits, dim, x, low, scale):
    """One head row with one low and scale."""
    if bits == 4:
        for j in range(dim // 2):
            x[j] = np.float32(codes[j] & np.uint8(15)) * scale + low
            x[dim // 2 + j] = np.float32(codes[j] >> np.uint8(4)) * scale + low
    else:
        for j in range(dim):
            x[j] = np.float32(codes[j]) * scale + low


@njit(inline="always")
def _dequantise_columns(codes, bits, dim, x, lows, scales):
    """One head row with a low and a scale per channel."""
    if bits == 4:
        half = dim // 2
        for j in range(half):
            x[j] = np.float32(codes[j] & np.uint8(15)) * scales[j] + lows[j]
            x[half + j] = np.float32(codes[j] >> np.uint8(4)) * scales[half + j] + lows[half + j]
    else:
        for j in range(dim):
            x[j] = np.float32(codes[j]) * scales[j] + lows[j]


@njit(inline="always")
def _rotate(x, cos_sin, rotary_dim, is_neox):
    half = rotary_dim // 2
    if is_neox:
        for j in range(half):
            a = x[j]
            b = x[half + j]
            x[j] = a * cos_sin[j] - b * cos_sin[half + j]
            x[half + j] = b * cos_sin[j] + a * cos_sin[half + j]
    else:
        for j in range(half):
            a = x[2 * j]
            b = x[2 * j + 1]
            x[2 * j] = a * cos_sin[j] - b * cos_sin[half + j]
            x[2 * j + 1] = b * cos_sin[j] + a * cos_sin[half + j]


@njit(inline="always")
def _store(x, kind, dim, out16):
    if kind == BFLOAT16:
        for j in range(dim):
            out16[j] = float_to_bfloat(x[j])
    else:
        for j in range(dim):
            out16[j] = float_to_half(x[j])


@cache
def decoder(bits: int, kind: int, dim: int, v_dim: int, rotary_dim: int, is_neox: bool) -> Callable:
    """The kernel for one shape, compiled at its first call; the constants let LLVM unroll and vectorise.

    The kernel is ``decode(payload, payload16, sections, key_buffers, value_buffers, num_slots, slots, table, start,
    num_exact, heads)``: rows ``start .. start + len(slots)`` of ``payload`` into row ``slots[i]`` of every buffer. The
    arguments are those of :func:`triton_ops.int_groups.cpu_encode.encode`, except that ``table`` is the rotation
    itself, at the rows' new positions. The caller has checked every bound.
    """
    code_width, v_code_width = dim * bits // 8, v_dim * bits // 8
    item = 4 if kind == FLOAT32 else 2

    @njit(nogil=True, cache=True)
    def decode(
        payload, payload16, sections, key_buffers, value_buffers, num_slots, slots, table, start, num_exact, heads
    ):
        width, v_width = heads * dim, heads * v_dim
        scratch: np.ndarray = np.empty(max(dim, v_dim), np.float32)
        params = np.empty((heads, 2, dim), np.float32)
        for layer in range(len(key_buffers)):
            base = layer * sections[6]
            keys8, keys16, keys32 = buffer_views(key_buffers[layer], num_slots * width * item)
            values8, values16, values32 = buffer_views(value_buffers[layer], num_slots * v_width * item)
            loaded = -1
            for i in range(len(slots)):
                slot = slots[i]
                ahead = slots[min(i + AHEAD, len(slots) - 1)]
                prefetch_row(key_buffers[layer] + ahead * width * item, width * item)
                prefetch_row(value_buffers[layer] + ahead * v_width * item, v_width * item)
                row = start + i - num_exact
                if row < 0:
                    at, to = base + sections[0] + (start + i) * width * item, slot * width * item
                    keys8[to : to + width * item] = payload[at : at + width * item]
                    at, to = base + sections[1] + (start + i) * v_width * item, slot * v_width * item
                    values8[to : to + v_width * item] = payload[at : at + v_width * item]
                    continue
                if row // GROUP != loaded:
                    loaded = row // GROUP
                    at = (base + sections[2]) // 2 + loaded * 2 * width
                    for part in range(2):
                        for head in range(heads):
                            for j in range(dim):
                                params[head, part, j] = half_to_float(payload16[at + part * width + head * dim + j])
                for head in range(heads):
                    at = base + sections[4] + (row * heads + head) * code_width
                    codes = payload[at : at + code_width]
                    at = slot * width + head * dim
                    x = keys32[at : at + dim] if kind == FLOAT32 else scratch
                    _dequantise_columns(codes, bits, dim, x, params[head, 0], params[head, 1])
                    if rotary_dim > 0:
                        _rotate(x, table[i], rotary_dim, is_neox)
                    if kind != FLOAT32:
                        _store(x, kind, dim, keys16[at : at + dim])
                for head in range(heads):
                    pair = (base + sections[3]) // 2 + (row * heads + head) * 2
                    low = half_to_float(payload16[pair])
                    scale = half_to_float(payload16[pair + 1])
                    at = base + sections[5] + (row * heads + head) * v_code_width
                    codes = payload[at : at + v_code_width]
                    at = slot * v_width + head * v_dim
                    x = values32[at : at + v_dim] if kind == FLOAT32 else scratch
                    _dequantise_row(codes, bits, v_dim, x, low, scale)
                    if kind != FLOAT32:
                        _store(x, kind, v_dim, values16[at : at + v_dim])

    return decode
