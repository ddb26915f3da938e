"""Launches of the kernels between a calibrated block and the pool, and of rotated codes; see :mod:`.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from triton_ops.align.kernel import add_rows
from triton_ops.band_codes import BAND, Bands, packed_bytes
from triton_ops.band_codes import kernel as band_codes
from triton_ops.paged import PagedPool
from triton_ops.report.cases import ROWS, SHAPES, SLOTS, VARIANTS, Launch, Shape, integer_groups, pool, rotation
from triton_ops.rotated.kernel import decode, plane_bytes, tile
from triton_ops.transform.kernel import restore_unit
from triton_ops.transform.reference import Unit

_NARROW = 512
"""Widest row whose layers share a unit by three."""
_MEAN_WIDTH = 4


def slots_of(num_rows: int) -> torch.Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:num_rows]


def row_width(shape: Shape) -> int:
    return shape.heads * (shape.dim + shape.v_dim)


def units() -> Iterator[Launch]:
    """Of ``fast`` and ``dense``: rows of one unit from its components and the row below."""
    for name, shape in {**SHAPES, **VARIANTS}.items():
        yield from _unit(name, shape, 1)
        if name in SHAPES and row_width(shape) <= _NARROW:
            yield from _unit(f"{name}-unit3", shape, 3)


def _unit(config: str, shape: Shape, layers: int) -> Iterator[Launch]:
    shape = replace(shape, layers=layers)
    width, below_width = layers * row_width(shape), row_width(shape)
    keys, values = pool(shape, shape.dim), pool(shape, shape.v_dim) if shape.v_dim else None
    weights = torch.ones(below_width, width)
    unit = Unit(torch.ones(width, width), weights, torch.ones(width))
    components, below, rows = torch.ones(ROWS, width), torch.ones(ROWS, below_width), torch.empty(ROWS, width)
    slots, turn = slots_of(ROWS), rotation(shape)

    def run() -> None:
        restore_unit(components, 1.0, below, unit, 0, keys, values, slots, 0, turn, rows)

    pools = (*keys.views, *(values.views if values is not None else ()))
    essential = [components, below, rows, *pools]
    operands = (components, below, *(() if turn is None else (turn.cos_sin,)))
    yield Launch(config, ROWS * layers, essential, run, operands=operands, matrices=(unit.basis, weights, unit.bias))


def components() -> Iterator[Launch]:
    """Of a unit: unpacked from bands of mixed width, and reference rows added."""
    for name, shape in SHAPES.items():
        width = row_width(shape)
        own, reference = torch.ones(ROWS, width), torch.ones(3 * ROWS, width)
        source, scale = torch.randperm(3 * ROWS)[:ROWS], torch.ones(ROWS)
        out = torch.empty(ROWS, width)
        essential = [own, reference, out]
        yield Launch(name, ROWS, essential, partial(add_rows, own, reference, source, scale, out))
        widths: np.ndarray = (np.arange(width // BAND) % (2 * _MEAN_WIDTH + 1)).astype(np.uint8)
        where: np.ndarray = np.arange(0, ROWS * width, 101, dtype=np.int64)  # one component in a hundred
        packed: np.ndarray = np.zeros(packed_bytes(widths, ROWS), np.uint8)
        bands = Bands(ROWS, widths, np.full(len(widths), 64, np.uint8), packed, where, np.ones(len(where), np.float16))
        on_device = band_codes.upload(bands, torch.device("cpu"))
        essential = [on_device.packed, on_device.where, on_device.values, out]
        yield Launch(name, ROWS, essential, partial(band_codes.to_components, on_device, 0, ROWS, out))


def rotated() -> Iterator[Launch]:
    """Rotated codes of keys: four bits throughout, and mixed widths in every shape."""
    yield _rotated("llama-8b-rotated4", SHAPES["llama-8b"], [4] * 8)
    for name, shape in {**SHAPES, **VARIANTS}.items():
        yield _rotated(f"{name}-rotated-mixed", shape, [2 + head % 4 for head in range(shape.heads)])


def _rotated(config: str, shape: Shape, widths: list[int]) -> Launch:
    bytes_a_row = shape.layers * (
        sum(plane_bytes(shape.dim, widths, 1)) + shape.heads * shape.dim * shape.dtype.itemsize
    )
    shape = replace(shape, layers=tile(shape.dim, shape.rotary, shape.layers, bytes_a_row)[1])
    keys = pool(shape, shape.dim)
    widths = widths * shape.layers
    norms = torch.ones(shape.layers, shape.heads, ROWS, dtype=torch.float16)
    codes = torch.zeros(sum(plane_bytes(shape.dim, widths, ROWS)), dtype=torch.uint8)
    slots, turn = slots_of(ROWS), rotation(shape)

    def run(keys: PagedPool = keys) -> None:
        decode(norms, codes, widths, keys, slots, 0, turn)

    return Launch(config, ROWS * shape.layers, [norms, codes, *keys.views], run)


def all_launches() -> Iterator[Launch]:
    """Every configuration that ships."""
    yield from integer_groups()
    yield from units()
    yield from components()
    yield from rotated()
