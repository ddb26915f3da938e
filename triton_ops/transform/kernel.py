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
from triton_ops.rope.kernel import partner, table_tile, turn
from triton_ops.rope.reference import Rotation
from triton_ops.transform.reference import Unit

_ROWS, _DEPTH = 32, 32


@triton.jit
def _product(x_ptr, matrix_ptr, row, here, column, live, DEPTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Columns of ``x @ matrix``, float32 ``[rows, columns]``: ``x`` ``[n, DEPTH]``, ``matrix`` ``[DEPTH, WIDTH]``."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for first in range(0, DEPTH, STEP):
        k = first + tl.arange(0, STEP)
        inside = k < DEPTH
        x = tl.load(x_ptr + row[:, None] * DEPTH + k[None, :], mask=here[:, None] & inside[None, :], other=0.0)
        at = k[:, None].to(tl.int64) * WIDTH + column[None, :]
        matrix = tl.load(matrix_ptr + at, mask=inside[:, None] & live[None, :], other=0.0)
        total = tl.dot(x, matrix, total, input_precision="tf32x3")
    return total


@triton.jit
def _columns(
    components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here, column, live,
    COMPONENTS: tl.constexpr, BELOW: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    x = _product(components_ptr, basis_ptr, row, here, column, live, COMPONENTS, WIDTH, STEP) * scale
    x += tl.load(bias_ptr + column, mask=live, other=0.0)[None, :]
    if BELOW > 0:
        x += _product(below_ptr, weights_ptr, row, here, column, live, BELOW, WIDTH, STEP)
    return x


@triton.jit
def synthesise_kernel(
    components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, rows_ptr,
    pool_ptr, offsets_ptr, slots_ptr, table_ptr, num_rows, first_layer, position,
    page_stride, place_stride, head_stride,
    COMPONENTS: tl.constexpr, BELOW: tl.constexpr, WIDTH: tl.constexpr, LAYER_WIDTH: tl.constexpr,
    BEGIN: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr, POOL_ALIGN: tl.constexpr,
    ROTARY: tl.constexpr, NEOX: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one layer of the unit, ``ROWS`` rows; ``BEGIN`` is where keys or values begin in a layer."""
    HALF: tl.constexpr = DIM // 2
    SHARED: tl.constexpr = ROTARY == 0 or (NEOX and ROTARY == DIM)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    head, layer = tl.program_id(1), tl.program_id(2)
    low = tl.arange(0, TILE)
    high = low + HALF
    live = low < HALF
    mask = here[:, None] & live[None, :]
    begin = layer * LAYER_WIDTH + BEGIN + head * DIM
    x = _columns(
        components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here, begin + low, live,
        COMPONENTS, BELOW, WIDTH, STEP,
    )  # fmt: skip
    y = _columns(
        components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here, begin + high, live,
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
            other = _columns(
                components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here,
                begin + partner(low, ROTARY, NEOX), live, COMPONENTS, BELOW, WIDTH, STEP,
            )  # fmt: skip
            x = turn(x, other, cos, sin, low, DIM, ROTARY)
            other = _columns(
                components_ptr, basis_ptr, below_ptr, weights_ptr, bias_ptr, scale, row, here,
                begin + partner(high, ROTARY, NEOX), live, COMPONENTS, BELOW, WIDTH, STEP,
            )  # fmt: skip
            cos, sin = table_tile(table_ptr, row + position, high, mask, ROTARY, NEOX, False)
            y = turn(y, other, cos, sin, high, DIM, ROTARY)
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
    values: PagedPool,
    slots: torch.Tensor,
    position: int,
    rotation: Rotation | None,
    rows: torch.Tensor | None = None,
) -> None:
    """Rows of all layers of a unit into the pool; :func:`reference.synthesise`, then :func:`reference.scatter`.

    Args:
        components: float32 ``[n, components]``, contiguous.
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
    layer_width = keys.heads * keys.dim + values.heads * values.dim
    depth = 0 if unit.weights is None or below is None else len(unit.weights)
    if width % layer_width or keys.dim % 2 or values.dim % 2:
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
    for pool, begin in ((keys, 0), (values, keys.heads * keys.dim)):
        turns = rotation if pool is keys else None
        synthesise_kernel[-(-num_rows // _ROWS), pool.heads, width // layer_width](
            components, unit.basis, below if depth else empty, unit.weights if depth else empty, unit.bias,
            float(scale), rows if rows is not None else empty, carried(pool), pool.offsets, slots,
            turns.cos_sin if turns is not None else empty, num_rows, first_layer, position, *pool.strides,
            COMPONENTS=len(unit.basis), BELOW=depth, WIDTH=width, LAYER_WIDTH=layer_width, BEGIN=begin, DIM=pool.dim,
            KIND=DTYPES[pool.dtype], PAGE=pool.page_size, POOL_ALIGN=pool.align,
            ROTARY=turns.rotary_dim if turns is not None else 0, NEOX=turns.is_neox if turns is not None else True,
            KEEP=rows is not None, ROWS=_ROWS, TILE=max(16, triton.next_power_of_2(pool.dim // 2)), STEP=_DEPTH,
            num_warps=4, num_stages=2, enable_fp_fusion=False,
        )  # fmt: skip
