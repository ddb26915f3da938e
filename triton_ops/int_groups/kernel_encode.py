"""Triton encoder of ``int4/1`` and ``int8/1``: gather, undo RoPE, quantise and pack in one pass.

Same bytes as :mod:`triton_ops.int_groups.reference` with :func:`triton_ops.rope.undo`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from triton_ops.int_groups.blocks import FIELDS, Block, check_slots, plan
from triton_ops.int_groups.kernel_exact import check_payload, copy_exact, rotation_of, shape_of
from triton_ops.int_groups.kernel_params import column_params, low_and_scale, to_codes
from triton_ops.int_groups.reference import FP16_MAX, GROUP
from triton_ops.int_groups.tiles import key_choice, value_choice
from triton_ops.paged import PagedPool
from triton_ops.paged.kernel import carried, launch_device, layer_pointer, slot_offset, to_float
from triton_ops.rope.kernel import exchange, exchange_distance, partner, table_tile, turn
from triton_ops.rope.reference import Rotation

_GROUP = tl.constexpr(GROUP)
_FIELDS = tl.constexpr(FIELDS)
_LARGEST = tl.constexpr(FP16_MAX)


@triton.jit
def encode_keys_kernel(
    payload_ptr, halves_ptr, blocks_ptr, pool_ptr, offsets_ptr, slots_ptr, table_ptr, failed_ptr,
    num_groups, num_layers, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    POOL_ALIGN: tl.constexpr, ROTARY: tl.constexpr, NEOX: tl.constexpr, ALIGN: tl.constexpr,
    TILE: tl.constexpr, LAYERS: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Keys of one group of one block: channels ``TILE`` and as many of the other half, ``LAYERS`` layers, all heads."""
    HALF: tl.constexpr = DIM // 2
    SHARED: tl.constexpr = ROTARY == 0 or (NEOX and ROTARY == DIM)
    TOP: tl.constexpr = 2**BITS - 1
    block = tl.program_id(0) // num_groups
    block_ptr = blocks_ptr + block * _FIELDS
    group = tl.program_id(0) % num_groups
    row = group.to(tl.int64) * _GROUP + tl.arange(0, _GROUP)
    num_rows = tl.load(block_ptr + 2)
    here = row < num_rows
    low = tl.program_id(1) * TILE + tl.arange(0, TILE)
    high = low + HALF
    live = (low < HALF) & (group * _GROUP < num_rows)
    mask = here[:, None] & live[None, :]
    slot = tl.load(slots_ptr + row + tl.load(block_ptr + 3), mask=here, other=0)
    place = slot_offset(slot, page_stride, place_stride, PAGE)
    if ROTARY > 0:
        at = row + tl.load(block_ptr + 4)
        cos, sin = table_tile(table_ptr, at, low, mask, ROTARY, NEOX, True)
        if not SHARED:
            high_cos, high_sin = table_tile(table_ptr, at, high, mask, ROTARY, NEOX, True)
    payload = tl.multiple_of(tl.load(block_ptr), 16)
    record = tl.multiple_of(tl.load(block_ptr + 13), 16)
    params = tl.multiple_of(tl.load(block_ptr + 9), ALIGN)
    codes = tl.multiple_of(tl.load(block_ptr + 11), ALIGN)
    first_layer = tl.program_id(2) * LAYERS
    for i in range(tl.minimum(LAYERS, num_layers - first_layer) * HEADS):
        layer, head = first_layer + i // HEADS, i % HEADS
        base = payload + layer * record
        row_ptr = layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN) + place[:, None] + head * head_stride
        x = to_float(tl.load(row_ptr + low[None, :], mask=mask, other=0), KIND)
        y = to_float(tl.load(row_ptr + high[None, :], mask=mask, other=0), KIND)
        if ROTARY > 0:
            if SHARED:
                turned = turn(x, y, cos, sin, low, DIM, ROTARY)
                y = turn(y, x, cos, -sin, high, DIM, ROTARY)
                x = turned
            elif DISTANCE > 0:
                x = turn(x, exchange(x, DISTANCE), cos, sin, low, DIM, ROTARY)
                y = turn(y, exchange(y, DISTANCE), high_cos, high_sin, high, DIM, ROTARY)
            else:
                z = tl.load(row_ptr + partner(low, ROTARY, NEOX)[None, :], mask=mask, other=0)
                x = turn(x, to_float(z, KIND), cos, sin, low, DIM, ROTARY)
                z = tl.load(row_ptr + partner(high, ROTARY, NEOX)[None, :], mask=mask, other=0)
                y = turn(y, to_float(z, KIND), high_cos, high_sin, high, DIM, ROTARY)
        params_ptr = halves_ptr + (base + params) // 2 + group * (2 * HEADS * DIM) + head * DIM
        low16, scale16, least, per_step, good = column_params(x, mask, TOP)
        tl.store(params_ptr + low, low16, mask=live)
        tl.store(params_ptr + HEADS * DIM + low, scale16, mask=live)
        low_codes = to_codes(x, least[None, :], per_step[None, :], TOP)
        low16, scale16, least, per_step, also_good = column_params(y, mask, TOP)
        tl.store(params_ptr + high, low16, mask=live)
        tl.store(params_ptr + HEADS * DIM + high, scale16, mask=live)
        high_codes = to_codes(y, least[None, :], per_step[None, :], TOP)
        to = payload_ptr + base + codes + (row[:, None] * HEADS + head) * (DIM * BITS // 8) + low[None, :]
        if BITS == 4:
            tl.store(to, low_codes | high_codes << 4, mask=mask)
        else:
            tl.store(to, low_codes, mask=mask)
            tl.store(to + HALF, high_codes, mask=mask)
        if (good & also_good) == 0:
            tl.store(failed_ptr + block, 1)


@triton.jit
def encode_values_kernel(
    payload_ptr, halves_ptr, blocks_ptr, pool_ptr, offsets_ptr, slots_ptr, failed_ptr,
    num_tiles, num_layers, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    POOL_ALIGN: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """Values of ``ROWS`` rows of one block, ``LAYERS`` layers, all heads; ``TILE`` is at least half a head."""
    HALF: tl.constexpr = DIM // 2
    TOP: tl.constexpr = 2**BITS - 1
    block = tl.program_id(0) // num_tiles
    block_ptr = blocks_ptr + block * _FIELDS
    row = (tl.program_id(0) % num_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < tl.load(block_ptr + 2)
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
        row_ptr = (
            layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN) + place[:, None] + head * head_stride + low[None, :]
        )
        x = to_float(tl.load(row_ptr, mask=mask, other=0), KIND)
        y = to_float(tl.load(row_ptr + HALF, mask=mask, other=0), KIND)
        fine = (tl.abs(x) <= _LARGEST) & (tl.abs(y) <= _LARGEST)
        smallest = tl.min(tl.where(mask & fine, tl.minimum(x, y), _LARGEST), axis=1)
        largest = tl.max(tl.where(mask & fine, tl.maximum(x, y), -_LARGEST), axis=1)
        low16, scale16, least, per_step = low_and_scale(smallest, largest, TOP)
        head_row = row * HEADS + head
        pair_ptr = halves_ptr + (base + params) // 2 + head_row * 2
        tl.store(pair_ptr, low16, mask=here)
        tl.store(pair_ptr + 1, scale16, mask=here)
        low_codes = to_codes(tl.where(fine, x, 0.0), least[:, None], per_step[:, None], TOP)
        high_codes = to_codes(tl.where(fine, y, 0.0), least[:, None], per_step[:, None], TOP)
        to = payload_ptr + base + codes + head_row[:, None] * (DIM * BITS // 8) + low[None, :]
        if BITS == 4:
            tl.store(to, low_codes | high_codes << 4, mask=mask)
        else:
            tl.store(to, low_codes, mask=mask)
            tl.store(to + HALF, high_codes, mask=mask)
        if tl.min((fine | ~mask).to(tl.int32)) == 0:
            tl.store(failed_ptr + block, 1)


def encode(
    payload: torch.Tensor,
    blocks: Sequence[Block],
    keys: PagedPool,
    values: PagedPool | None,
    slots: torch.Tensor,
    bits: int,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Encode pool rows; arguments as :func:`triton_ops.int_groups.kernel.decode`, except:

    Args:
        payload: overwritten where the blocks lie; the padding of records is left as it is, zeros if it was zeros.
        blocks: ``start`` 0 and ``stop`` ``num_rows``.
        slots: where the rows are.

    Returns:
        int32 ``[blocks]`` on the pool's device: 1 where a value is NaN, infinite or beyond 65504; the payload of that
        block is then unspecified. Not looked at here: that would cost a device synchronisation.

    Raises:
        ValueError: an argument is not as above.
        RuntimeError: a pool on a CPU without Triton's interpreter.
    """
    launch_device(keys)
    for block in blocks:
        if (block.start, block.stop) != (0, block.num_rows):
            raise ValueError(f"int_groups: a block is encoded as a whole, got rows {block.start}..{block.stop}")
    positions = len(rotation.cos_sin) if rotation is not None else -1
    work = plan(blocks, keys, values, bits, check_payload(payload), positions)
    check_slots(slots, work.num_rows, keys)
    failed = torch.zeros(len(work.table), dtype=torch.int32, device=keys.device)
    if work.any_exact:
        copy_exact(payload, work.table, keys, values, slots, False)
    if not work.most_groups:
        return failed
    rotary, neox = rotation_of(rotation, keys)
    halves, layers = payload.view(torch.float16), keys.num_layers
    tile = key_choice("encode_keys", keys, bits, rotary, neox).pick()
    encode_keys_kernel[len(work.table) * work.most_groups, tile.steps, -(-layers // tile.layers)](
        payload, halves, work.table, carried(keys), keys.offsets, slots,
        rotation.inverse if rotation is not None else payload, failed, work.most_groups, layers, *keys.strides,
        **shape_of(keys, bits), ROTARY=rotary, NEOX=neox, ALIGN=work.align, TILE=tile.channels, LAYERS=tile.layers,
        DISTANCE=exchange_distance(keys.dim, rotary, neox, tile.channels),
        num_warps=tile.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    if values is None:
        return failed
    tile = value_choice("encode_values", values, bits).pick()
    tiles = -(-work.most_groups * GROUP // tile.rows)
    encode_values_kernel[len(work.table) * tiles, -(-layers // tile.layers)](
        payload, halves, work.table, carried(values), values.offsets, slots, failed, tiles, layers, *values.strides,
        **shape_of(values, bits), ALIGN=work.align, TILE=tile.channels, ROWS=tile.rows, LAYERS=tile.layers,
        num_warps=tile.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return failed
