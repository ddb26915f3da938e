"""CPU kernel: pool rows to one encoded payload, fused gather + undo RoPE + quantise + pack; one thread."""

from __future__ import annotations

import numpy as np
from numba import njit

from triton_ops.int_groups.cpu_scalars import (
    AHEAD,
    BFLOAT16,
    FLOAT32,
    bfloat_to_float,
    buffer_views,
    half_at_least,
    half_at_most,
    half_to_float,
    order,
    prefetch_row,
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
def _pack(codes, bits, dim, x, lows, per_step, top):
    """One head row with a low and a step per channel, as the format packs it."""
    if bits == 4:
        half = dim // 2
        for j in range(half):
            code = _code(x[half + j], lows[half + j], per_step[half + j], top)
            codes[j] = _code(x[j], lows[j], per_step[j], top) | np.uint8(code << np.uint8(4))
    else:
        for j in range(dim):
            codes[j] = _code(x[j], lows[j], per_step[j], top)


@njit(inline="always")
def _low_and_scale(smallest, largest, reciprocal):
    """Bits of the stored low and scale, then low and 1 / scale for the codes; arguments from :func:`order`."""
    low_bits = half_at_most(unorder(smallest))
    low = half_to_float(low_bits)
    scale_bits = half_at_least((unorder(largest) - low) * reciprocal)
    scale = half_to_float(scale_bits)
    return low_bits, scale_bits, low, (np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_keys(codes, params, bits, kind, heads, dim, buffer, num_slots, slots, table, rotary_dim, is_neox):
    """Quantised keys of one layer; False when a value cannot be encoded."""
    width, code_width = heads * dim, heads * dim * bits // 8
    top, reciprocal = np.float32(2**bits - 1), np.float32(1.0 / (2**bits - 1))
    item = 4 if kind == FLOAT32 else 2
    _, keys16, keys32 = buffer_views(buffer, num_slots * width * item)
    tile = np.empty((GROUP, width), np.float32)
    lows, per_step = np.empty(width, np.float32), np.empty(width, np.float32)
    smallest, largest = np.empty(width, np.int32), np.empty(width, np.int32)
    for first in range(0, len(slots), GROUP):
        size = min(GROUP, len(slots) - first)
        smallest[:] = np.int32(0x7FFFFFFF)
        largest[:] = np.int32(-0x80000000)
        for i in range(size):
            ahead = slots[min(first + i + AHEAD, len(slots) - 1)]
            prefetch_row(buffer + ahead * width * item, width * item)
            at = slots[first + i] * width
            row = tile[i]
            _load(row, kind, width, keys32[at : at + width], keys16[at : at + width])
            if rotary_dim > 0:
                for head in range(heads):
                    _unrotate(row[head * dim : head * dim + dim], table[first + i], rotary_dim, is_neox)
            for j in range(width):
                smallest[j] = min(smallest[j], order(row[j]))
                largest[j] = max(largest[j], order(row[j]))
        group = params[first // GROUP * 2 * width : (first // GROUP + 1) * 2 * width]
        for j in range(width):
            if smallest[j] < _SMALLEST or largest[j] > _LARGEST:
                return False
            group[j], group[width + j], lows[j], per_step[j] = _low_and_scale(smallest[j], largest[j], reciprocal)
        for i in range(size):
            packed = codes[(first + i) * code_width : (first + i + 1) * code_width]
            for head in range(heads):
                at, end = head * dim, head * dim + dim
                head_codes = packed[head * dim * bits // 8 : end * bits // 8]
                _pack(head_codes, bits, dim, tile[i, at:end], lows[at:end], per_step[at:end], top)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def _encode_values(codes, params, bits, kind, heads, dim, buffer, num_slots, slots):
    """Quantised values of one layer; False when a value cannot be encoded."""
    code_width = dim * bits // 8
    top, reciprocal = np.float32(2**bits - 1), np.float32(1.0 / (2**bits - 1))
    x, lows, per_step = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.float32)
    item = 4 if kind == FLOAT32 else 2
    row_bytes = heads * dim * item
    _, values16, values32 = buffer_views(buffer, num_slots * row_bytes)
    for i in range(len(slots) * heads):
        row, head = i // heads, i % heads
        if head == 0:
            prefetch_row(buffer + slots[min(row + AHEAD, len(slots) - 1)] * row_bytes, row_bytes)
        at = (slots[row] * heads + head) * dim
        _load(x, kind, dim, values32[at : at + dim], values16[at : at + dim])
        smallest, largest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for j in range(dim):
            smallest = min(smallest, order(x[j]))
            largest = max(largest, order(x[j]))
        if smallest < _SMALLEST or largest > _LARGEST:
            return False
        params[2 * i], params[2 * i + 1], low, step = _low_and_scale(smallest, largest, reciprocal)
        lows[:] = low
        per_step[:] = step
        _pack(codes[i * code_width : (i + 1) * code_width], bits, dim, x, lows, per_step, top)
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def encode(
    out, out16, sections, key_buffers, value_buffers, num_slots, slots, table, num_exact,
    bits, kind, heads, dim, v_dim, rotary_dim, is_neox,
):  # fmt: skip
    """Encode rows ``slots`` of every layer; the twin of :mod:`reference` over :func:`Rotary.undo`'s keys.

    Args:
        out: uint8 payload, ``out16`` the same bytes as uint16; the padding of a record is left as it is.
        sections: int64 ``[7]``: where the six sections of a layer record begin, and its length.
        key_buffers, value_buffers: int64 ``[layers]``, addresses of contiguous ``[num_slots, heads, dim]``.
        slots: int64 ``[n]``.
        table: float32 ``[n, rotary_dim]``, the *inverse* rotation, cosines then sines.
        num_exact: rows at the front to copy byte for byte.
        bits, kind, ...: the format, the pool's element and shape; ``rotary_dim`` 0 leaves keys as they are.

    Returns:
        0, or 1 + the layer that holds a value that cannot be encoded; then ``out`` is half written.

    One compiled kernel serves every shape; the caller has checked every bound.
    """
    width, v_width = heads * dim, heads * v_dim
    item = 4 if kind == FLOAT32 else 2
    for layer in range(len(key_buffers)):
        base = layer * sections[6]
        keys8, _, _ = buffer_views(key_buffers[layer], num_slots * width * item)
        values8, _, _ = buffer_views(value_buffers[layer], num_slots * v_width * item)
        for i in range(num_exact):
            at, row = base + sections[0] + i * width * item, slots[i] * width * item
            out[at : at + width * item] = keys8[row : row + width * item]
            at, row = base + sections[1] + i * v_width * item, slots[i] * v_width * item
            out[at : at + v_width * item] = values8[row : row + v_width * item]
        codes = out[base + sections[4] : base + sections[5]]
        params = out16[(base + sections[2]) // 2 : (base + sections[3]) // 2]
        kept = slots[num_exact:]
        buffer = key_buffers[layer]
        if not _encode_keys(
            codes, params, bits, kind, heads, dim, buffer, num_slots, kept, table[num_exact:], rotary_dim, is_neox
        ):
            return layer + 1
        codes = out[base + sections[5] : base + sections[6]]
        params = out16[(base + sections[3]) // 2 : (base + sections[4]) // 2]
        if not _encode_values(codes, params, bits, kind, heads, v_dim, value_buffers[layer], num_slots, kept):
            return layer + 1
    return 0
