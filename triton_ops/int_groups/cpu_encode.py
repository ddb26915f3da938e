"""CPU kernel: pool rows to one encoded payload, fused gather + undo RoPE + quantise + pack; one thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import carray, njit

from triton_ops.int_groups.cpu_scalars import (
    BFLOAT16,
    FLOAT32,
    bfloat_to_float,
    half_at_least,
    half_at_most,
    half_to_float,
    order,
    pointer,
    unorder,
)
from triton_ops.int_groups.reference import FP16_MAX, GROUP

_SMALLEST = int(np.array(-FP16_MAX, np.float32).view(np.int32) ^ 0x7FFFFFFF)  # order(-65504)
_LARGEST = int(np.array(FP16_MAX, np.float32).view(np.int32))  # order(65504)


@njit(inline="always")
def _load(x, kind, dim, row32, row16):
    if kind == FLOAT32:
        for j in range(dim):
            x[j] = row32[j]
    elif kind == BFLOAT16:
        for j in range(dim):
            x[j] = bfloat_to_float(row16[j])
    else:
        for j in range(dim):
            x[j] = half_to_float(row16[j])


@njit(inline="always")
def _unrotate(x, cos_sin, rotary_dim, is_neox):
    half = rotary_dim // 2
    if is_neox:
        for j in range(half):
            a = x[j]
            b = x[half + j]
            x[j] = a * cos_sin[j] + b * cos_sin[half + j]
            x[half + j] = b * cos_sin[j] - a * cos_sin[half + j]
    else:
        for j in range(half):
            a = x[2 * j]
            b = x[2 * j + 1]
            x[2 * j] = a * cos_sin[j] + b * cos_sin[half + j]
            x[2 * j + 1] = b * cos_sin[j] - a * cos_sin[half + j]


@njit(inline="always")
def _code(x, low, per_step, top):
    steps = (x - low) * per_step + np.float32(0.5)
    return np.uint8(np.int32(steps if steps < top else top))


@njit(inline="always")
def _scale_bits(largest, low, reciprocal):
    return half_at_least((largest - low) * reciprocal)


@cache
def encoder(bits: int, kind: int, heads: int, dim: int, v_dim: int, rotary_dim: int, is_neox: bool) -> Callable:
    """The kernel for one shape (compiled at its first call).

    ``encode(out, out16, offsets, key_buffers, value_buffers, num_slots, slots, table, num_exact) -> int``: the inverse of
    :func:`triton_ops.int_groups.cpu_decode.decoder`'s kernel, same arguments, except that ``table`` float32
    ``[len(slots), rotary_dim]`` holds the *inverse* rotation. Returns 0, or 1 + the layer that holds a value that cannot
    be encoded; then ``out`` is half written.
    """
    width, v_width = heads * dim, heads * v_dim
    code_width, v_code_width = dim * bits // 8, v_dim * bits // 8
    item = 4 if kind == FLOAT32 else 2
    top = float(2**bits - 1)
    smallest_allowed, largest_allowed = _SMALLEST, _LARGEST

    @njit(nogil=True, cache=True, error_model="numpy")
    def encode(out, out16, offsets, key_buffers, value_buffers, num_slots, slots, table, num_exact):
        top32, reciprocal = np.float32(top), np.float32(1.0 / top)
        tile = np.empty((GROUP, heads, dim), np.float32)
        lows, per_step = np.empty((heads, dim), np.float32), np.empty((heads, dim), np.float32)
        smallest, largest = np.empty((heads, dim), np.int32), np.empty((heads, dim), np.int32)
        x = np.empty(v_dim, np.float32)
        for layer in range(len(key_buffers)):
            base = layer * offsets[6]
            keys8 = carray(pointer(key_buffers[layer]), num_slots * width * item, np.uint8)
            values8 = carray(pointer(value_buffers[layer]), num_slots * v_width * item, np.uint8)
            keys16, values16 = keys8.view(np.uint16), values8.view(np.uint16)
            keys32, values32 = keys8.view(np.float32), values8.view(np.float32)
            for i in range(num_exact):
                slot = slots[i]
                at = base + offsets[0] + i * width * item
                out[at : at + width * item] = keys8[slot * width * item : (slot + 1) * width * item]
                at = base + offsets[1] + i * v_width * item
                out[at : at + v_width * item] = values8[slot * v_width * item : (slot + 1) * v_width * item]

            num_rows = len(slots) - num_exact
            for first in range(0, num_rows, GROUP):
                size = min(GROUP, num_rows - first)
                smallest[:] = np.int32(0x7FFFFFFF)
                largest[:] = np.int32(-0x80000000)
                for i in range(size):
                    slot = slots[num_exact + first + i]
                    for head in range(heads):
                        at = slot * width + head * dim
                        row = tile[i, head]
                        _load(row, kind, dim, keys32[at : at + dim], keys16[at : at + dim])
                        if rotary_dim > 0:
                            _unrotate(row, table[num_exact + first + i], rotary_dim, is_neox)
                        less, more = smallest[head], largest[head]
                        for j in range(dim):
                            less[j] = min(less[j], order(row[j]))
                            more[j] = max(more[j], order(row[j]))
                at = (base + offsets[2]) // 2 + first // GROUP * 2 * width
                for head in range(heads):
                    for j in range(dim):
                        if smallest[head, j] < smallest_allowed or largest[head, j] > largest_allowed:
                            return layer + 1
                        bits16 = half_at_most(unorder(smallest[head, j]))
                        low = half_to_float(bits16)
                        out16[at + head * dim + j] = bits16
                        bits16 = _scale_bits(unorder(largest[head, j]), low, reciprocal)
                        out16[at + width + head * dim + j] = bits16
                        scale = half_to_float(bits16)
                        lows[head, j] = low
                        per_step[head, j] = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
                for i in range(size):
                    for head in range(heads):
                        at = base + offsets[4] + ((first + i) * heads + head) * code_width
                        codes, row, low_row, step_row = out[at : at + code_width], tile[i, head], lows[head], per_step[head]
                        if bits == 4:
                            for j in range(dim // 2):
                                k = dim // 2 + j
                                codes[j] = _code(row[j], low_row[j], step_row[j], top32) | (
                                    _code(row[k], low_row[k], step_row[k], top32) << np.uint8(4)
                                )
                        else:
                            for j in range(dim):
                                codes[j] = _code(row[j], low_row[j], step_row[j], top32)

            for i in range(num_rows):
                for head in range(heads):
                    at = slots[num_exact + i] * v_width + head * v_dim
                    _load(x, kind, v_dim, values32[at : at + v_dim], values16[at : at + v_dim])
                    less1, more1 = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
                    for j in range(v_dim):
                        less1 = min(less1, order(x[j]))
                        more1 = max(more1, order(x[j]))
                    if less1 < smallest_allowed or more1 > largest_allowed:
                        return layer + 1
                    pair = (base + offsets[3]) // 2 + (i * heads + head) * 2
                    bits16 = half_at_most(unorder(less1))
                    low = half_to_float(bits16)
                    out16[pair] = bits16
                    bits16 = _scale_bits(unorder(more1), low, reciprocal)
                    out16[pair + 1] = bits16
                    scale = half_to_float(bits16)
                    step = np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)
                    at = base + offsets[5] + (i * heads + head) * v_code_width
                    codes = out[at : at + v_code_width]
                    if bits == 4:
                        for j in range(v_dim // 2):
                            codes[j] = _code(x[j], low, step, top32) | (
                                _code(x[v_dim // 2 + j], low, step, top32) << np.uint8(4)
                            )
                    else:
                        for j in range(v_dim):
                            codes[j] = _code(x[j], low, step, top32)
        return 0

    return encode
