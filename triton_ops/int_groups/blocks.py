"""Where a batch of ``int4/1`` and ``int8/1`` payloads lies in one buffer, as the Triton kernels read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from triton_ops.int_groups.reference import BITS, GROUP
from triton_ops.paged import PagedPool

RECORD_ALIGN = 16
FIELDS = 14
"""Numbers that a kernel reads of a block: see :meth:`Plan.table`."""


@dataclass(frozen=True)
class Block:
    """One payload, and the rows of it that are wanted.

    Attributes:
        offset: bytes in front of it in the buffer, a multiple of 16.
        num_rows, num_exact: as it was encoded.
        start, stop: rows, half-open. To encode, all of them.
        position: absolute position of row 0, at its new place where rows are restored.
    """

    offset: int
    num_rows: int
    num_exact: int
    start: int
    stop: int
    position: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.offset % RECORD_ALIGN:
            raise ValueError(f"Block: offset must be a multiple of {RECORD_ALIGN}, got {self.offset}")
        if not 0 <= self.num_exact <= self.num_rows or not 0 <= self.start <= self.stop <= self.num_rows:
            raise ValueError(
                f"Block: need num_exact and start..stop within {self.num_rows} rows, got {self.num_exact} and "
                f"{self.start}..{self.stop}"
            )
        if self.position < 0:
            raise ValueError(f"Block: position must not be negative, got {self.position}")


def sections(keys: PagedPool, values: PagedPool | None, bits: int, num_rows: int, num_exact: int) -> list[int]:
    """Where the six sections of a layer's record begin, then the record's length, in bytes; see FORMAT.md."""
    rows, heads, item = num_rows - num_exact, keys.heads, keys.dtype.itemsize
    k, v = heads * keys.dim, heads * values.dim if values is not None else 0
    sizes = (
        num_exact * k * item,
        num_exact * v * item,
        -(-rows // GROUP) * 2 * k * 2,
        rows * heads * 4 if v else 0,
        rows * k * bits // 8,
        rows * v * bits // 8,
    )
    offsets = list(accumulate(sizes, initial=0))
    return [*offsets[:-1], -(-offsets[-1] // RECORD_ALIGN) * RECORD_ALIGN]


@dataclass(frozen=True)
class Plan:
    """What one launch works on: checked blocks, their table on the device, and what the grid needs.

    Attributes:
        table: int64 ``[blocks, FIELDS]`` on the pool's device: offset of the payload; first and last coded row, and
            what to add to a coded row for its place in ``slots`` and for its position; first and last exact row, and
            what to add for its place in ``slots``; offsets in a record of exact values, key parameters, value
            parameters, key codes and value codes (exact keys begin it); length of a record.
        align: bytes that divide every offset, 1 to 16.
        num_rows: rows that are wanted.
        most_groups: key groups that a block touches at most.
        any_exact: an exact row is wanted.
    """

    table: torch.Tensor
    align: int
    num_rows: int
    most_groups: int
    any_exact: bool


def plan(
    blocks: Sequence[Block], keys: PagedPool, values: PagedPool | None, bits: int, payload_bytes: int, positions: int
) -> Plan:
    """Check ``blocks`` against the pools and a buffer.

    Args:
        values: None for latent rows.
        payload_bytes: of the buffer.
        positions: rows of the rotation's table; -1 for none.

    Raises:
        ValueError: pools of different shapes, an odd head dim, a payload outside the buffer, a position outside the
            table, or bits that are not 4 or 8.
    """
    if bits not in BITS:
        raise ValueError(f"int_groups: bits must be 4 or 8, got {bits}")
    for pool in (keys, values) if values is not None else (keys,):
        if pool.dim % 2 or not pool.dim:
            raise ValueError(f"int_groups: the kernels need an even head dim, got {pool.dim}")
        if (pool.num_layers, pool.heads, pool.dtype) != (keys.num_layers, keys.heads, keys.dtype):
            raise ValueError("int_groups: keys and values must have the same layers, heads and dtype")
    rows, align, slot, most_groups, any_exact = [], RECORD_ALIGN, 0, 0, False
    for block in blocks:
        begins = sections(keys, values, bits, block.num_rows, block.num_exact)
        if block.offset + keys.num_layers * begins[6] > payload_bytes:
            raise ValueError(f"int_groups: a block at {block.offset} leaves the payload of {payload_bytes} bytes")
        if 0 <= positions < block.position + block.stop:
            raise ValueError(
                f"int_groups: the table has positions 0..{positions - 1}, got up to {block.position + block.stop - 1}"
            )
        first, last = max(block.start - block.num_exact, 0), max(block.stop - block.num_exact, 0)
        first_exact, last_exact = min(block.start, block.num_exact), min(block.stop, block.num_exact)
        to_slot = slot - block.start
        rows.append(
            (
                block.offset,
                *(first, last, to_slot + block.num_exact, block.position + block.num_exact),
                *(first_exact, last_exact, to_slot),
                *begins[1:],
            )
        )
        align = math.gcd(align, *begins[1:6])
        slot += block.stop - block.start
        if last > first:
            most_groups = max(most_groups, (last - 1) // GROUP - first // GROUP + 1)
        any_exact |= last_exact > first_exact
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, FIELDS).to(keys.device)
    return Plan(table, align, slot, most_groups, any_exact)


def check_slots(slots: torch.Tensor, num_rows: int, pool: PagedPool) -> None:
    """Refuse slots that are not int64 ``[num_rows]``, contiguous, on the pool's device.

    Their values are not checked: that would cost a device synchronisation.
    """
    if slots.dtype != torch.int64 or tuple(slots.shape) != (num_rows,) or not slots.is_contiguous():
        raise ValueError(
            f"int_groups: slots must be contiguous int64 [{num_rows}], got {slots.dtype} {tuple(slots.shape)}"
        )
    if slots.device != pool.device:
        raise ValueError(f"int_groups: slots are on {slots.device}, the pool on {pool.device}")
