"""Pools, blocks and the slow twins of the fused kernels over integer groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from triton_ops.int_groups import reference
from triton_ops.int_groups.blocks import Block, sections
from triton_ops.paged import PagedPool
from triton_ops.paged.reference import to_float, to_pool
from triton_ops.rope import Rotation, apply, undo


@dataclass(frozen=True)
class Case:
    """A shape that ships; ``layout`` is nhd or hnd, ``rotary`` 0 for keys that stay rotated, ``v_dim`` 0 for MLA."""

    heads: int = 2
    dim: int = 64
    v_dim: int = 64
    rotary: int = 64
    is_neox: bool = True
    bits: int = 8
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nhd"
    page: int = 1
    layers: int = 2


def rotation_of(case: Case, positions: int, device: torch.device) -> Rotation | None:
    if not case.rotary:
        return None
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, case.rotary, 2) / case.rotary)
    table = torch.cat((angles.cos(), angles.sin()), 1) * math.sqrt(1.25)  # a magnitude, as YaRN has
    return Rotation(table.float().to(device), case.is_neox)


def pool(case: Case, dim: int, pages: int, device: torch.device, seed: int | None) -> PagedPool:
    """Random rows, a few channels large; NaN where ``seed`` is None. Not contiguous: pages lie apart."""
    generator = torch.Generator().manual_seed(seed or 0)
    heads, page = case.heads, case.page
    shape = (pages, page, heads, dim) if case.layout == "nhd" else (pages, heads, page, dim)
    buffers = []
    for _ in range(case.layers):
        rows = torch.randn(shape[0], 2, *shape[1:], generator=generator) * (1 + 9 * (torch.arange(dim) % 7 == 3))
        rows = to_pool(rows, case.dtype) if seed is not None else torch.full_like(rows, float("nan")).to(case.dtype)
        buffers.append(rows.to(device)[:, 1])
    return PagedPool.nhd(buffers) if case.layout == "nhd" else PagedPool.hnd(buffers)


def sizes(case: Case, blocks: list[tuple[int, int]], keys: PagedPool, values: PagedPool | None) -> list[int]:
    """Bytes of the payloads of blocks ``(num_rows, num_exact)``."""
    return [case.layers * sections(keys, values, case.bits, *block)[6] for block in blocks]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def encode(
    payload: torch.Tensor, block: Block, case: Case, keys: PagedPool, values: PagedPool | None, slots: torch.Tensor,
    rotation: Rotation | None,
) -> None:  # fmt: skip
    """One block by the specification."""
    at, e = block.offset, block.num_exact
    positions = torch.arange(block.position, block.position + block.num_rows)[e:]
    for layer in range(case.layers):
        k = keys.gather(layer, slots)
        rows = to_float(k[e:])
        if rotation is not None:
            rows = undo(rotation, rows, positions)
        params, codes = reference.encode_keys(rows, case.bits)
        parts = [k[:e], params, codes]
        if values is not None:
            v = values.gather(layer, slots)
            value_params, value_codes = reference.encode_values(to_float(v[e:]), case.bits)
            parts = [k[:e], v[:e], params, value_params, codes, value_codes]
        record = torch.cat([as_bytes(part) for part in parts])
        payload[at : at + len(record)] = record
        at += sections(keys, values, case.bits, block.num_rows, e)[6]


def decode(
    payload: torch.Tensor, block: Block, case: Case, keys: PagedPool, values: PagedPool | None, slots: torch.Tensor,
    rotation: Rotation | None,
) -> None:  # fmt: skip
    """The wanted rows of one block by the specification."""
    begins, e, heads = sections(keys, values, case.bits, block.num_rows, block.num_exact), block.num_exact, case.heads
    first, last = max(block.start - e, 0), max(block.stop - e, 0)
    exact = slice(min(block.start, e), min(block.stop, e))
    positions = torch.arange(first, last) + e + block.position
    for layer in range(case.layers):
        at = block.offset + layer * begins[6]
        parts = [payload[at + a : at + b].clone() for a, b in pairwise(begins)]
        params = parts[2].view(torch.float16).view(-1, 2, heads, case.dim)
        codes = parts[4].view(-1, heads, case.dim * case.bits // 8)[first:last]
        rows = reference.decode_keys(params, codes, case.bits, first)
        if rotation is not None:
            rows = apply(rotation, rows, positions)
        kept = parts[0].view(case.dtype).view(e, heads, case.dim)[exact]
        keys.scatter(layer, slots, torch.cat((kept, to_pool(rows, case.dtype))))
        if values is None:
            continue
        params = parts[3].view(torch.float16).view(-1, heads, 2)[first:last]
        size = (block.num_rows - e) * heads * case.v_dim * case.bits // 8
        codes = parts[5][:size].view(-1, heads, case.v_dim * case.bits // 8)[first:last]
        kept = parts[1].view(case.dtype).view(e, heads, case.v_dim)[exact]
        rows = to_pool(reference.decode_values(params, codes, case.bits), case.dtype)
        values.scatter(layer, slots, torch.cat((kept, rows)))
