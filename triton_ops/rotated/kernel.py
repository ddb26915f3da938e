"""Triton decoder of rotated Lloyd-Max codes of mixed width: unpack, turn back, RoPE, cast and scatter in one pass.

Same bits as :func:`triton_ops.rotated.reference.decode` with :func:`triton_ops.rope.apply` and ``to_pool``. Every head
of every layer has a width of its own. A program takes some rows and layers and all heads, so that a row's cosines are
read once for them; eight codes are as many bytes as a code has bits and are read as one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from triton_ops.paged import DTYPES, PagedPool
from triton_ops.paged.kernel import carried, launch_device, layer_pointer, slot_offset, to_pool
from triton_ops.rope.kernel import exchange, exchange_distance, partner, table_tile, turn
from triton_ops.rope.reference import Rotation
from triton_ops.rotated.levels import POSITIVE
from triton_ops.rotated.reference import BITS, code_bytes, signs_of


@triton.jit
def _turned_channels(
    codes_ptr, levels_ptr, width, row, scale, FIRST: tl.constexpr, LAST: tl.constexpr, DIM: tl.constexpr,
    PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Channels ``FIRST .. FIRST + PIECE`` as they were coded, float32 ``[ROWS, PIECE]``; from ``LAST`` on anything."""
    EIGHTS: tl.constexpr = PIECE // 8
    group = FIRST // 8 + tl.arange(0, EIGHTS)
    byte = tl.arange(0, 8)
    at = codes_ptr + (row * (DIM // 8 * width))[:, None, None] + (group * width)[None, :, None] + byte[None, None, :]
    mask = (scale >= 0.0)[:, None, None] & (group < LAST // 8)[None, :, None] & (byte < width)[None, None, :]
    bits = tl.load(at, mask=mask, other=0).to(tl.int64) << (8 * byte)[None, None, :]
    number = tl.sum(bits, axis=2)
    code = (number[:, :, None] >> (byte * width)[None, None, :]).to(tl.int32) & ((1 << width) - 1)
    code = tl.reshape(code, (ROWS, PIECE))
    half = 1 << (width - 1)
    positive = code >= half
    level = tl.load(levels_ptr + half - 1 + tl.where(positive, code - half, half - 1 - code))
    return tl.where(positive, level, -level) * scale[:, None]


@triton.jit
def _hadamard(x, PIECE: tl.constexpr, LOG: tl.constexpr, OVER_ROOT: tl.constexpr):
    channel = tl.arange(0, PIECE)
    for i in tl.static_range(LOG):
        other = exchange(x, 1 << i)
        x = tl.where(((channel >> i) & 1 == 0)[None, :], x + other, other - x)
    return x * OVER_ROOT


@triton.jit
def _pick(x, channel, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """Columns of a tile, the nearest where there is none."""
    column = tl.minimum(tl.maximum(channel, 0), PIECE - 1)
    return tl.gather(x, tl.broadcast_to(column[None, :], (ROWS, PIECE)), 1)


@triton.jit
def decode_rotated_kernel(
    norms_ptr, codes_ptr, begins_ptr, widths_ptr, levels_ptr, signs_ptr, pool_ptr, offsets_ptr, slots_ptr, table_ptr,
    num_rows, num_layers, position, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PIECE: tl.constexpr, LOG: tl.constexpr, OVER_ROOT: tl.constexpr,
    OVER_DIM: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr, POOL_ALIGN: tl.constexpr, ROTARY: tl.constexpr,
    NEOX: tl.constexpr, DISTANCE: tl.constexpr, ROWS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of ``LAYERS`` layers, all heads: the first ``PIECE`` channels of a head, then the last."""
    SHIFT: tl.constexpr = DIM - PIECE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    first = tl.arange(0, PIECE)
    last = first + SHIFT
    mask = here[:, None] & (first < PIECE)[None, :]
    slot = tl.load(slots_ptr + row, mask=here, other=0)
    place = slot_offset(slot, page_stride, place_stride, PAGE)
    first_sign = tl.load(signs_ptr + first).to(tl.float32)[None, :]
    rest = mask & (last >= PIECE)[None, :]
    if SHIFT > 0:
        last_sign = tl.load(signs_ptr + PIECE + first).to(tl.float32)[None, :]
    if ROTARY > 0:
        cos, sin = table_tile(table_ptr, row + position, first, mask, ROTARY, NEOX, False)
        if SHIFT > 0:
            last_cos, last_sin = table_tile(table_ptr, row + position, last, rest, ROTARY, NEOX, False)
    first_layer = tl.program_id(1) * LAYERS
    for i in range(tl.minimum(LAYERS, num_layers - first_layer) * HEADS):
        layer, head = first_layer + i // HEADS, i % HEADS
        plane = layer * HEADS + head
        width = tl.load(widths_ptr + plane)
        codes = codes_ptr + tl.load(begins_ptr + plane)
        norm = tl.load(norms_ptr + plane.to(tl.int64) * num_rows + row, mask=here, other=0.0).to(tl.float32)
        scale = tl.where(here, norm * OVER_DIM, -1.0)
        x = _turned_channels(codes, levels_ptr, width, row, scale, 0, PIECE if SHIFT == 0 else SHIFT, DIM, PIECE, ROWS)
        if SHIFT > 0:
            y = _turned_channels(codes, levels_ptr, width, row, scale, SHIFT, DIM, DIM, PIECE, ROWS)
            y = _hadamard(y, PIECE, LOG, OVER_ROOT) * last_sign
            x = tl.where((first < SHIFT)[None, :], x, _pick(y, first - SHIFT, ROWS, PIECE))
        x = _hadamard(x, PIECE, LOG, OVER_ROOT) * first_sign
        to = layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN) + place[:, None] + head * head_stride
        if ROTARY > 0:
            if DISTANCE > 0:
                other = exchange(x, DISTANCE)
            else:
                other = partner(first, ROTARY, NEOX)
                from_first = _pick(x, other, ROWS, PIECE)
                if SHIFT > 0:
                    from_last = _pick(y, other - SHIFT, ROWS, PIECE)
                    other = tl.where((other < PIECE)[None, :], from_first, from_last)
                else:
                    other = from_first
            if SHIFT > 0:
                its = partner(last, ROTARY, NEOX)
                its_value = tl.where(
                    (its < PIECE)[None, :], _pick(x, its, ROWS, PIECE), _pick(y, its - SHIFT, ROWS, PIECE)
                )
                y = turn(y, its_value, last_cos, last_sin, last, DIM, ROTARY)
            x = turn(x, other, cos, sin, first, DIM, ROTARY)
        tl.store(to + first[None, :], to_pool(x, KIND), mask=mask)
        if SHIFT > 0:
            tl.store(to + last[None, :], to_pool(y, KIND), mask=rest)


@cache
def _tables(piece: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positive levels of all widths one after the other, and the signs of both pieces."""
    levels = [level for bits in BITS for level in POSITIVE[bits]]
    return torch.tensor(levels, device=device), torch.tensor(signs_of(2 * piece), device=device).to(torch.int8)


def plane_bytes(dim: int, widths: Sequence[int], num_rows: int) -> list[int]:
    """Bytes of the codes of every head of every layer."""
    return [num_rows * code_bytes(dim, width) for width in widths]


def decode(
    norms: torch.Tensor,
    codes: torch.Tensor,
    widths: Sequence[int],
    pool: PagedPool,
    slots: torch.Tensor,
    position: int,
    rotation: Rotation | None = None,
) -> None:
    """Restore rows of keys or values into a paged pool.

    Args:
        norms: float16 ``[layers, heads, n]``, contiguous.
        codes: uint8 ``[bytes]``, contiguous: for every layer and head, what
            :func:`triton_ops.rotated.reference.encode` gives for the ``n`` rows of that head.
        widths: bits of a code of every layer and head, ``layers * heads`` numbers of 1 to 8.
        pool: of a head dim that is a multiple of 16.
        slots: int64 ``[n]``, not checked for bounds.
        position: of the first row; the rest follow.
        rotation: the model's, where keys were encoded without; None for values.

    Raises:
        ValueError: an argument is not as above, or a position outside the table.
        RuntimeError: a pool on a CPU without Triton's interpreter.
    """
    launch_device(pool)
    planes, num_rows, dim = pool.num_layers * pool.heads, len(slots), pool.dim
    if dim % 16 or not dim:
        raise ValueError(f"rotated: the kernel needs a head dim that is a multiple of 16, got {dim}")
    if len(widths) != planes or any(width not in BITS for width in widths):
        raise ValueError(f"rotated: widths must be {planes} numbers of 1 to 8, got {list(widths)}")
    if norms.shape != (pool.num_layers, pool.heads, num_rows) or norms.dtype != torch.float16:
        raise ValueError(f"rotated: norms must be float16 {(pool.num_layers, pool.heads, num_rows)}, got {norms.shape}")
    sizes = plane_bytes(dim, widths, num_rows)
    if codes.shape != (sum(sizes),) or codes.dtype != torch.uint8:
        raise ValueError(f"rotated: codes must be uint8 [{sum(sizes)}], got {codes.dtype} {tuple(codes.shape)}")
    if slots.ndim != 1 or slots.dtype != torch.int64:
        raise ValueError(f"rotated: slots must be int64 [n], got {slots.dtype} {tuple(slots.shape)}")
    if not (norms.is_contiguous() and codes.is_contiguous() and slots.is_contiguous()):
        raise ValueError("rotated: norms, codes and slots must be contiguous")
    if rotation is not None and (rotation.rotary_dim > dim or position + num_rows > len(rotation.cos_sin)):
        raise ValueError(
            f"rotated: a table of {len(rotation.cos_sin)} positions and {rotation.rotary_dim} channels for rows up to "
            f"position {position + num_rows - 1} of {dim}"
        )
    if not num_rows:
        return
    piece = 1 << dim.bit_length() - 1
    rotary, neox = (rotation.rotary_dim, rotation.is_neox) if rotation is not None else (0, True)
    levels, signs = _tables(piece, pool.device)
    begins = torch.tensor([0, *accumulate(sizes)][:-1], dtype=torch.int64, device=pool.device)
    rows, layers = tile(dim, rotary, pool.num_layers, sum(sizes) // num_rows + planes * dim * pool.dtype.itemsize)
    decode_rotated_kernel[-(-num_rows // rows), -(-pool.num_layers // layers)](
        norms, codes, begins, torch.tensor(widths, dtype=torch.int32, device=pool.device), levels, signs,
        carried(pool), pool.offsets, slots, rotation.cos_sin if rotation is not None else levels, num_rows,
        pool.num_layers, position, *pool.strides,
        HEADS=pool.heads, DIM=dim, PIECE=piece, LOG=piece.bit_length() - 1, OVER_ROOT=1.0 / math.sqrt(piece),
        OVER_DIM=1.0 / math.sqrt(dim), KIND=DTYPES[pool.dtype], PAGE=pool.page_size, POOL_ALIGN=pool.align,
        ROTARY=rotary, NEOX=neox, DISTANCE=_distance(dim, piece, rotary, neox), ROWS=rows, LAYERS=layers,
        num_warps=8, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def tile(dim: int, rotary: int, num_layers: int, bytes_a_row: int) -> tuple[int, int]:
    """Rows and layers of a program; the rotation's table is at most a 50th of the bytes of all layers' rows."""
    piece = 1 << dim.bit_length() - 1
    rows = 8 if piece > 128 else min(64, 4096 // piece)  # 16 rows of 256 channels spill on sm_100
    programs = max(1, bytes_a_row // (50 * 4 * rotary) if rotary else num_layers // 4)
    return rows, -(-num_layers // programs)


def _distance(dim: int, piece: int, rotary: int, neox: bool) -> int:
    """As :func:`triton_ops.rope.kernel.exchange` takes it, for tiles of whole heads; 0 where partners are gathered."""
    if dim != piece or not rotary:
        return 0
    return dim // 2 if neox and rotary == dim else exchange_distance(dim, rotary, neox, piece)
