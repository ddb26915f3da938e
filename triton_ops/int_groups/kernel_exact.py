"""Copies exact rows between payloads and a paged pool, and what the kernels of both directions check and are told."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_ops.int_groups.blocks import FIELDS
from triton_ops.paged import DTYPES, PagedPool
from triton_ops.paged.kernel import CARRIERS, carried, layer_pointer, slot_offset
from triton_ops.rope.reference import Rotation

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def copy_exact_kernel(
    payload_ptr, blocks_ptr, pool_ptr, offsets_ptr, slots_ptr, page_stride, place_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr, PAGE: tl.constexpr,
    POOL_ALIGN: tl.constexpr, ITEM: tl.constexpr, VALUES: tl.constexpr, TO_POOL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Exact rows of one layer of one block, keys or values, element by element; between payload and pool."""
    block_ptr = blocks_ptr + tl.program_id(0) * _FIELDS
    layer = tl.program_id(1)
    at = tl.load(block_ptr) + layer * tl.load(block_ptr + 13)
    if VALUES:
        at += tl.load(block_ptr + 8)
    element = tl.arange(0, TILE)
    mask = element < HEADS * DIM
    inside = element // DIM * head_stride + element % DIM
    pool_ptr = layer_pointer(pool_ptr, offsets_ptr, layer, POOL_ALIGN)
    for row in range(tl.load(block_ptr + 5), tl.load(block_ptr + 6)):
        slot = tl.load(slots_ptr + row + tl.load(block_ptr + 7))
        in_payload = payload_ptr + at // ITEM + row * (HEADS * DIM) + element
        in_pool = pool_ptr + slot_offset(slot, page_stride, place_stride, PAGE) + inside
        if TO_POOL:
            tl.store(in_pool, tl.load(in_payload, mask=mask), mask=mask)
        else:
            tl.store(in_payload, tl.load(in_pool, mask=mask), mask=mask)


def copy_exact(
    payload: torch.Tensor,
    table: torch.Tensor,
    keys: PagedPool,
    values: PagedPool | None,
    slots: torch.Tensor,
    to_pool: bool,
) -> None:
    """Exact rows between ``payload`` uint8 and the pools, by a plan's ``table``."""
    for pool in (keys, values) if values is not None else (keys,):
        kind, width = DTYPES[pool.dtype], pool.heads * pool.dim
        typed = payload.view(CARRIERS[kind])
        copy_exact_kernel[len(table), pool.num_layers](
            typed, table, carried(pool), pool.offsets, slots, *pool.strides,
            HEADS=pool.heads, DIM=pool.dim, KIND=kind, PAGE=pool.page_size, POOL_ALIGN=pool.align,
            ITEM=pool.dtype.itemsize, VALUES=pool is values, TO_POOL=to_pool, TILE=triton.next_power_of_2(width),
        )  # fmt: skip


def shape_of(pool: PagedPool, bits: int) -> dict[str, int]:
    """What every kernel is compiled for, by name."""
    return {
        "HEADS": pool.heads,
        "DIM": pool.dim,
        "BITS": bits,
        "KIND": DTYPES[pool.dtype],
        "PAGE": pool.page_size,
        "POOL_ALIGN": pool.align,
    }


def row_bytes(pool: Any, bits: int) -> int:
    """Codes and elements of a row in one layer, of a pool or what has its ``heads``, ``dim`` and ``dtype``."""
    return pool.heads * pool.dim * (bits + 8 * pool.dtype.itemsize) // 8


def check_payload(payload: torch.Tensor) -> int:
    """Bytes of a payload buffer; a ``ValueError`` where the kernels cannot read it."""
    if payload.dtype != torch.uint8 or payload.ndim != 1 or not payload.is_contiguous():
        raise ValueError(f"int_groups: payload must be contiguous uint8 [bytes], got {payload.dtype}")
    if payload.data_ptr() % 16 or len(payload) % 16:
        raise ValueError("int_groups: payload must begin and end at a multiple of 16 bytes")
    return len(payload)


def rotation_of(rotation: Rotation | None, keys: PagedPool) -> tuple[int, bool]:
    """``(rotary dim, NeoX)``, 0 where nothing turns; a ``ValueError`` where it does not fit the keys."""
    if rotation is None:
        return 0, True
    if rotation.rotary_dim > keys.dim or rotation.cos_sin.device != keys.device:
        raise ValueError(
            f"int_groups: a rotation of {rotation.rotary_dim} channels on {rotation.cos_sin.device} for keys of "
            f"{keys.dim} on {keys.device}"
        )
    return rotation.rotary_dim, rotation.is_neox
