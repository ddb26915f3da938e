"""Triton restore of a unit: two products, RoPE, cast and scatter; see :mod:`triton_ops.transform.reference`.

Rows reach memory once in the pool and, where the next unit is predicted from them, once as float32 for it. Products run
on tensor cores as three tf32 products each (``tf32x3``), which keeps the accuracy of fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.paged import DTYPES, PagedPool
from triton_ops.paged.kernel import carried, launch_device, layer_pointer, slot_offset, to_pool
from triton_ops.rope.kernel import exchange, exchange_distance, partner, table_tile, turn
from triton_ops.rope.reference import Rotation
from triton_ops.transform.reference import Unit

_ROWS, _DEPTH, _CHANNELS = 32, 32, 64  # 64 rows spill on sm_80 and sm_100, and most keys on sm_90


@triton.jit
def _products(
    x_ptr, matrix_ptr, row, here, first, second, live, DEPTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):
    """Columns ``first`` and ``second`` of ``x @ matrix``, float32 ``[rows, columns]``; ``x`` is read once.

    ``x`` is ``[n, DEPTH]``, ``matrix`` ``[DEPTH, WIDTH]``.
    """
    total = tl.zeros((row.shape[0], first.shape[0]), tl.float32)
    other = total
    for begin in range(0, DEPTH, STEP):
        k = begin + tl.arange(0, STEP)
        inside = k < DEPTH
        x = tl.load(x_ptr + row[:, None] * DEPTH + k[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        line = matrix_ptr + k[:, None].to(tl.int64) * WIDTH
        mask = inside[:, None] & live[None, :]
        total = tl.dot(x, tl.load(line + first[None, :], mask=mask, other=0.0), total, input_precision="tf32x3")
        other = tl.dot(x, tl.load(line + second[None, :], mask=mask, other=0.0), other, input_precision="tf32x3")
    return total, other


@triton.jit
def _columns(
    components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here, first, second, live,
    COMPONENTS: tl.constexpr, BELOW: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    x, y = _products(components_ptr, basis_ptr, row, here, first, second, live, COMPONENTS, WIDTH, STEP)
    x = x * scale + tl.load(bias_ptr + first, mask=live, other=0.0)[None, :]
    y = y * scale + tl.load(bias_ptr + second, mask=live, other=0.0)[None, :]
    if BELOW > 0:
        more, other = _products(below_ptr, weights_ptr, row, here, first, second, live, BELOW, WIDTH, STEP)
        return x + more, y + other
    return x, y


@triton.jit
def synthesise_kernel(
    components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, rows_ptr,
    pool_ptr, offsets_ptr, slots_ptr, table_ptr, num_rows, first_layer, position,
    page_stride, place_stride, head_stride,
    COMPONENTS: tl.constexpr, BELOW: tl.constexpr, WIDTH: tl.constexpr, LAYER_WIDTH: tl.constexpr,
    BEGIN: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr, POOL_ALIGN: tl.constexpr,
    ROTARY: tl.constexpr, NEOX: tl.constexpr, DISTANCE: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``TILE`` channels of either half of one head in one layer of the unit, ``ROWS`` rows.

    ``BEGIN`` is where keys or values begin in a layer. Programs with the same rows are next to each other, so that what
    they multiply comes from the cache.
    """
    HALF: tl.constexpr = DIM // 2
    SHARED: tl.constexpr = ROTARY == 0 or (NEOX and ROTARY == DIM)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    head, layer = tl.program_id(0) // STEPS, tl.program_id(1)
    low = tl.program_id(0) % STEPS * TILE + tl.arange(0, TILE)
    high = low + HALF
    live = low < HALF
    mask = here[:, None] & live[None, :]
    begin = layer * LAYER_WIDTH + BEGIN + head * DIM
    x, y = _columns(
        components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here, begin + low, begin + high, live,
        COMPONENTS, BELOW, WIDTH, STEP,
    )  # fmt: skip
    if KEEP:
        kept = rows_ptr + row[:, None] * WIDTH + begin
        tl.store(kept + low[None, :], x, mask=mask)
        tl.store(kept + high[None, :], y, mask=mask)
    if ROTARY > 0:
        cos, sin = table_tile(table_ptr, row + position, low, mask, ROTARY, NEOX, False)
        if SHARED:
            turned = turn(x, y, cos, sin, low, DIM, ROTARY)
            y = turn(y, x, cos, -sin, high, DIM, ROTARY)
            x = turned
        else:
            if DISTANCE > 0:
                to_x, to_y = exchange(x, DISTANCE), exchange(y, DISTANCE)
            else:
                to_x, to_y = _columns(
                    components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here,
                    begin + partner(low, ROTARY, NEOX), begin + partner(high, ROTARY, NEOX), live,
                    COMPONENTS, BELOW, WIDTH, STEP,
                )  # fmt: skip
            x = turn(x, to_x, cos, sin, low, DIM, ROTARY)
            cos, sin = table_tile(table_ptr, row + position, high, mask, ROTARY, NEOX, False)
            y = turn(y, to_y, cos, sin, high, DIM, ROTARY)
    slot = tl.load(slots_ptr + row, mask=here, other=0)
    place = slot_offset(slot, page_stride, place_stride, PAGE)
    to = layer_pointer(pool_ptr, offsets_ptr, first_layer + layer, POOL_ALIGN) + place[:, None] + head * head_stride
    tl.store(to + low[None, :], to_pool(x, KIND), mask=mask)
    tl.store(to + high[None, :], to_pool(y, KIND), mask=mask)


def restore_unit(
    components: torch.Tensor,
    scale: float,
    below: torch.Tensor | None,
    unit: Unit,
    first_layer: int,
    keys: PagedPool,
    values: PagedPool | None,
    slots: torch.Tensor,
    position: int,
    rotation: Rotation | None,
    rows: torch.Tensor | None = None,
) -> None:
    """Rows of all layers of a unit into the pool; :func:`reference.synthesise`, then :func:`reference.scatter`.

    Args:
        components: float32 ``[n, components]``, contiguous.
        values: None for latent rows.
        below: float32 ``[n, width below]``, contiguous; None where nothing is predicted.
        slots: int64 ``[n]``, not checked for bounds.
        position: of the first row; the rest follow.
        rows: float32 ``[n, width]``, contiguous, overwritten with the rows before rotation and cast; None where they
            are not needed.

    Raises:
        ValueError: shapes that do not fit each other, an odd head dim, or a position outside the table.
        RuntimeError: a pool on a CPU without Triton's interpreter.
    """
    launch_device(keys)
    num_rows, width = len(components), len(unit.bias)
    pools = [(keys, 0)] if values is None else [(keys, 0), (values, keys.heads * keys.dim)]
    layer_width = sum(pool.heads * pool.dim for pool, _ in pools)
    depth = 0 if unit.weights is None or below is None else len(unit.weights)
    if width % layer_width or any(pool.dim % 2 for pool, _ in pools):
        raise ValueError(f"transform: a unit of {width} channels for layers of {layer_width}, head dims must be even")
    shapes = (("components", components, len(unit.basis)), ("below", below, depth), ("rows", rows, width))
    for name, x, wanted in shapes:
        if x is not None and (x.shape != (num_rows, wanted) or x.dtype != torch.float32 or not x.is_contiguous()):
            raise ValueError(f"transform: {name} must be contiguous float32 {(num_rows, wanted)}, got {tuple(x.shape)}")
    if slots.shape != (num_rows,) or slots.dtype != torch.int64:
        raise ValueError(f"transform: slots must be int64 [{num_rows}], got {slots.dtype} {tuple(slots.shape)}")
    if rotation is not None and position + num_rows > len(rotation.cos_sin):
        raise ValueError(f"transform: the table has {len(rotation.cos_sin)} positions, got {position + num_rows - 1}")
    if not num_rows:
        return
    empty = components
    for pool, begin in pools:
        turns = rotation if pool is keys else None
        rotary, neox = (turns.rotary_dim, turns.is_neox) if turns is not None else (0, True)
        tile = min(_CHANNELS, max(16, triton.next_power_of_2(pool.dim // 2)))
        steps = -(-pool.dim // 2 // tile)
        synthesise_kernel[pool.heads * steps, width // layer_width, -(-num_rows // _ROWS)](
            components, unit.basis, below if depth else empty, unit.weights if depth else empty, unit.bias,
            float(scale), rows if rows is not None else empty, carried(pool), pool.offsets, slots,
            turns.cos_sin if turns is not None else empty, num_rows, first_layer, position, *pool.strides,
            COMPONENTS=len(unit.basis), BELOW=depth, WIDTH=width, LAYER_WIDTH=layer_width, BEGIN=begin, DIM=pool.dim,
            KIND=DTYPES[pool.dtype], PAGE=pool.page_size, POOL_ALIGN=pool.align, ROTARY=rotary, NEOX=neox,
            DISTANCE=exchange_distance(pool.dim, rotary, neox, tile), KEEP=rows is not None,
            ROWS=_ROWS, TILE=tile, STEPS=steps, STEP=_DEPTH, num_warps=4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
