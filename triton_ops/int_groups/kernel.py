"""Triton decoder of ``int4/1`` and ``int8/1``: unpack, dequantise, RoPE, cast and scatter in one pass.

Same bits as :mod:`triton_ops.int_groups.reference` with :func:`triton_ops.rope.apply` and ``to_pool``. A program takes
one group of 64 key rows, some channels and a few layers, so that a row's cosines are read once for all heads of these
layers and a group's parameters once. Tiles are over bytes of ``int4``: channel j beside channel j + dim / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from triton_ops.int_groups.blocks import FIELDS, Block, check_slots, plan
from triton_ops.int_groups.kernel_exact import check_payload, copy_exact, rotation_of, shape_of
from triton_ops.int_groups.reference import GROUP
from triton_ops.int_groups.tiles import key_choice, value_choice
from triton_ops.paged import PagedPool
from triton_ops.paged.kernel import carried, launch_device, layer_pointer, slot_offset, to_pool
from triton_ops.rope.kernel import exchange, exchange_distance, partner, table_tile, turn
from triton_ops.rope.reference import Rotation

_GROUP = tl.constexpr(GROUP)
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def codes_to_float(codes):
    """uint8 to float32 without the slow conversion: the code is the low bits of 2**23 + code."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _load_codes(row_ptr, channel, mask, HALF: tl.constexpr, BITS: tl.constexpr):
    """Codes ``[rows, channels]`` as uint8 of any channels of a head row that begins at ``row_ptr``."""
    if BITS == 8:
        return tl.load(row_ptr + channel[None, :], mask=mask, other=0)
    byte = tl.load(row_ptr + (channel % HALF)[None, :], mask=mask, other=0)
    return (byte >> (channel // HALF * 4).to(tl.uint8)[None, :]) & 15


@triton.jit
def _key_channels(
    row_ptr, params_ptr, channel, mask, live, WIDTH: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr
):
    """Dequantised keys ``[rows, channels]`` of a head; ``live`` says which channels are there."""
    low = tl.load(params_ptr + channel, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(params_ptr + WIDTH + channel, mask=live, other=0.0).to(tl.float32)
    return codes_to_float(_load_codes(row_ptr, channel, mask, HALF, BITS)) * scale[None, :] + low[None, :]


@triton.jit
def decode_keys_kernel(
    payload_ptr, halves_ptr, blocks_ptr, pool_ptr, offsets_ptr, slots_ptr, table_ptr,
    num_groups, num_layers, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    POOL_ALIGN: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr, ALIGN: tl.constexpr,
    TILE: tl.constexpr, LAYERS: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Keys of one group of one block: channels ``TILE`` and as many of the other half, ``LAYERS`` layers, all heads."""
    HALF: tl.constexpr = DIM // 2
    SHARED: tl.constexpr = ROTARY == 0 or (NEOX and ROTARY == DIM)  # both of a pair are in a byte
    block_ptr = blocks_ptr + tl.program_id(0) // num_groups * _FIELDS
    first, last = tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    group = first // _GROUP + tl.program_id(0) % num_groups
    row = group * _GROUP + tl.arange(0, _GROUP)
    here = (row >= first) & (row < last)
    low = tl.program_id(1) * TILE + tl.arange(0, TILE)
    high = low + HALF
    live = low < HALF
    mask = here[:, None] & live[None, :]
    slot = tl.load(slots_ptr + row + tl.load(block_ptr + 3), mask=here, other=0)
    place = slot_offset(slot, page_stride, place_stride, PAGE)
    if ROTARY > 0:
        at = row + tl.load(block_ptr + 4)
        cos, sin = table_tile(table_ptr, at, low, mask, ROTARY, NEOX, False)
        if not SHARED:
            high_cos, high_sin = table_tile(table_ptr, at, high, mask, ROTARY, NEOX, False)
    payload = tl.multiple_of(tl.load(block_ptr), 16)
    record = tl.multiple_of(tl.load(block_ptr + 13), 16)
    params = tl.multiple_of(tl.load(block_ptr + 9), ALIGN)
    codes = tl.multiple_of(tl.load(block_ptr + 11), ALIGN)
    first_layer = tl.program_id(2) * LAYERS
    for i in range(tl.minimum(LAYERS, num_layers - first_layer) * HEADS):
        layer, head = first_layer + i // HEADS, i % HEADS
        base = payload + layer * record
        row_ptr = payload_ptr + base + codes + (row[:, None] * HEADS + head) * (DIM * BITS // 8)
        params_ptr = halves_ptr + (base + params) // 2 + group * (2 * HEADS * DIM) + head * DIM
        if BITS == 4 and (SHARED or DISTANCE > 0):
            byte = tl.load(row_ptr + low[None, :], mask=mask, other=0)
            low_low = tl.load(params_ptr + low, mask=live, other=0.0).to(tl.float32)[None, :]
            low_scale = tl.load(params_ptr + HEADS * DIM + low, mask=live, other=0.0).to(tl.float32)[None, :]
            high_low = tl.load(params_ptr + high, mask=live, other=0.0).to(tl.float32)[None, :]
            high_scale = tl.load(params_ptr + HEADS * DIM + high, mask=live, other=0.0).to(tl.float32)[None, :]
            x = codes_to_float(byte & 15) * low_scale + low_low
            y = codes_to_float(byte >> 4) * high_scale + high_low
        else:
            x = _key_channels(row_ptr, params_ptr, low, mask, live, HEADS * DIM, HALF, BITS)
            y = _key_channels(row_ptr, params_ptr, high, mask, live, HEADS * DIM, HALF, BITS)
        if ROTARY > 0:
            if SHARED:
                turned = turn(x, y, cos, sin, low, DIM, ROTARY)
                y = turn(y, x, cos, -sin, high, DIM, ROTARY)
                x = turned
            elif DISTANCE > 0:
                x = turn(x, exchange(x, DISTANCE), cos, sin, low, DIM, ROTARY)
                y = turn(y, exchange(y, DISTANCE), high_cos, high_sin, high, DIM, ROTARY)
            else:
                other = partner(low, ROTARY, NEOX)
                z = _key_channels(row_ptr, params_ptr, other, mask, live, HEADS * DIM, HALF, BITS)
                x = turn(x, z, cos, sin, low, DIM, ROTARY)
                other = partner(high, ROTARY, NEOX)
                z = _key_channels(row_ptr, params_ptr, other, mask, live, HEADS * DIM, HALF, BITS)
                y = turn(y, z, high_cos, high_sin, high, DIM, ROTARY)
        to = layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN) + place[:, None] + head * head_stride
        tl.store(to + low[None, :], to_pool(x, KIND), mask=mask)
        tl.store(to + high[None, :], to_pool(y, KIND), mask=mask)


@triton.jit
def decode_values_kernel(
    payload_ptr, halves_ptr, blocks_ptr, pool_ptr, offsets_ptr, slots_ptr,
    num_tiles, num_layers, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    POOL_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """Values of ``ROWS`` rows of one block, ``LAYERS`` layers, all heads; ``TILE`` is at least half a head."""
    HALF: tl.constexpr = DIM // 2
    block_ptr = blocks_ptr + tl.program_id(0) // num_tiles * _FIELDS
    first, last = tl.load(block_ptr + 1), tl.load(block_ptr + 2)
    row = first + tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS)
    here = row < last
    low = tl.arange(0, TILE)
    mask = here[:, None] & (low < HALF)[None, :]
    slot = tl.load(slots_ptr + row + tl.load(block_ptr + 3), mask=here, other=0)
    place = slot_offset(slot, page_stride, place_stride, PAGE)
    payload = tl.multiple_of(tl.load(block_ptr), 16)
    record = tl.multiple_of(tl.load(block_ptr + 13), 16)
    params = tl.multiple_of(tl.load(block_ptr + 10), ALIGN)
    codes = tl.multiple_of(tl.load(block_ptr + 12), ALIGN)
    first_layer = tl.program_id(1) * LAYERS
    for i in range(tl.minimum(LAYERS, num_layers - first_layer) * HEADS):
        layer, head = first_layer + i // HEADS, i % HEADS
        base = payload + layer * record
        head_row = row * HEADS + head
        pair_ptr = halves_ptr + (base + params) // 2 + head_row * 2
        least = tl.load(pair_ptr, mask=here, other=0.0).to(tl.float32)[:, None]
        scale = tl.load(pair_ptr + 1, mask=here, other=0.0).to(tl.float32)[:, None]
        row_ptr = payload_ptr + base + codes + head_row[:, None] * (DIM * BITS // 8) + low[None, :]
        byte = tl.load(row_ptr, mask=mask, other=0)
        if BITS == 4:
            x, y = codes_to_float(byte & 15), codes_to_float(byte >> 4)
        else:
            x, y = codes_to_float(byte), codes_to_float(tl.load(row_ptr + HALF, mask=mask, other=0))
        to = (
            layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN) + place[:, None] + head * head_stride + low[None, :]
        )
        tl.store(to, to_pool(x * scale + least, KIND), mask=mask)
        tl.store(to + HALF, to_pool(y * scale + least, KIND), mask=mask)


def decode(
    payload: torch.Tensor,
    blocks: Sequence[Block],
    keys: PagedPool,
    values: PagedPool | None,
    slots: torch.Tensor,
    bits: int,
    rotation: Rotation | None = None,
) -> None:
    """Restore rows of encoded blocks into a paged pool.

    Args:
        payload: uint8 ``[bytes]``, contiguous, at a multiple of 16, on the pool's device: as FORMAT.md has it.
        blocks: where the payloads lie, and which rows of them are wanted.
        keys, values: the pool; None for the values of latent rows.
        slots: int64 ``[rows of all blocks]``, where they go; neither checked for bounds nor for repetition.
        bits: 4 or 8.
        rotation: the model's, on the pool's device; None where payloads hold rotated keys.

    Raises:
        ValueError: an argument is not as above.
        RuntimeError: a pool on a CPU without Triton's interpreter.
    """
    launch_device(keys)
    positions = len(rotation.cos_sin) if rotation is not None else -1
    work = plan(blocks, keys, values, bits, check_payload(payload), positions)
    check_slots(slots, work.num_rows, keys)
    if work.any_exact:
        copy_exact(payload, work.table, keys, values, slots, True)
    if not work.most_groups:
        return
    rotary, neox = rotation_of(rotation, keys)
    halves, layers = payload.view(torch.float16), keys.num_layers
    tile = key_choice("decode_keys", keys, bits, rotary, neox).pick()
    decode_keys_kernel[len(work.table) * work.most_groups, tile.steps, -(-layers // tile.layers)](
        payload, halves, work.table, carried(keys), keys.offsets, slots,
        rotation.cos_sin if rotation is not None else payload, work.most_groups, layers, *keys.strides,
        **shape_of(keys, bits), ROTARY=rotary, NEOX=neox, ALIGN=work.align, TILE=tile.channels, LAYERS=tile.layers,
        DISTANCE=exchange_distance(keys.dim, rotary, neox, tile.channels),
        num_warps=tile.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    if values is None:
        return
    tile = value_choice("decode_values", values, bits).pick()
    tiles = -(-work.most_groups * GROUP // tile.rows)
    decode_values_kernel[len(work.table) * tiles, -(-layers // tile.layers)](
        payload, halves, work.table, carried(values), values.offsets, slots, tiles, layers, *values.strides,
        **shape_of(values, bits), ALIGN=work.align, TILE=tile.channels, ROWS=tile.rows, LAYERS=tile.layers,
        num_warps=tile.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
