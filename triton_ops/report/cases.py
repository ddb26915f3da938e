"""Every configuration that ships, as launches of the public functions over small pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from triton_ops.int_groups.blocks import Block, sections
from triton_ops.int_groups.config import key_tile
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode
from triton_ops.int_groups.kernel_exact import row_bytes
from triton_ops.paged import PagedPool
from triton_ops.rope import Rotation

ROWS, SLOTS = 64, 128


@dataclass(frozen=True)
class Shape:
    """Heads of one rank and layers of a model; ``rotary`` 0 and ``v_dim`` 0 for latent rows."""

    heads: int
    dim: int
    v_dim: int
    rotary: int
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    layout: str = "nhd"
    page: int = 1
    layers: int = 32


_LLAMA = Shape(8, 128, 128, 128)
SHAPES = {
    "llama-8b": _LLAMA,  # and Qwen3, Mistral
    "llama-70b-tp8": replace(_LLAMA, heads=1, layers=80),
    "smollm": Shape(3, 64, 64, 64, layers=30),
    "phi-3": Shape(8, 96, 96, 96),
    "gemma-2": Shape(4, 256, 256, 256, layers=26),
    "glm-4": Shape(2, 128, 128, 64, is_neox=False, layers=40),
    "phi-2": Shape(8, 80, 80, 32),
    "mla": Shape(1, 576, 0, 0, layers=27),
}
VARIANTS = {
    "llama-8b-unknown-rotary": replace(_LLAMA, rotary=0),
    "llama-8b-page16": replace(_LLAMA, page=16),
    "llama-8b-page64-hnd": replace(_LLAMA, page=64, layout="hnd"),
    "llama-8b-float32": replace(_LLAMA, dtype=torch.float32),
    "llama-8b-float16": replace(_LLAMA, dtype=torch.float16),
    "llama-8b-e4m3": replace(_LLAMA, dtype=torch.float8_e4m3fn),
    "llama-8b-e5m2": replace(_LLAMA, dtype=torch.float8_e5m2),
}
"""What changes how rows lie or what they are made of, not what is computed; with 8 bits only."""


@dataclass(frozen=True)
class Launch:
    """One call of a public function.

    Attributes:
        config: its name in the report.
        rows: tokens times layers that it handles.
        essential: tensors whose bytes must be read or written once: encoded rows and rows of the pool.
        call: launches the kernels.
        only: keep the records of this kernel alone.
        operands: of products, rows and what goes with them, which tiles read again and again; they count once.
        matrices: of products, the same for all rows; they do not count.
    """

    config: str
    rows: int
    essential: list[torch.Tensor]
    call: Callable[[], object]
    only: str = ""
    operands: tuple[torch.Tensor, ...] = ()
    matrices: tuple[torch.Tensor, ...] = ()


def pool(shape: Shape, dim: int) -> PagedPool:
    """Small whole numbers, which every type of element has."""
    pages = SLOTS // shape.page
    form = (pages, shape.page, shape.heads, dim) if shape.layout == "nhd" else (pages, shape.heads, shape.page, dim)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(-8, 9, form, generator=generator).float().to(shape.dtype) for _ in range(shape.layers)]
    return PagedPool.nhd(rows) if shape.layout == "nhd" else PagedPool.hnd(rows)


def rotation(shape: Shape) -> Rotation | None:
    if not shape.rotary:
        return None
    angles = torch.outer(torch.arange(SLOTS), 1e4 ** (-torch.arange(0, shape.rotary, 2) / shape.rotary))
    return Rotation(torch.cat((angles.cos(), angles.sin()), 1).float(), shape.is_neox)


def integer_groups() -> Iterator[Launch]:
    """Of ``int4`` and ``int8``: encode and decode, and the copy of exact rows."""
    for name, shape in SHAPES.items():
        for bits in (4, 8):
            yield from _integer_groups(f"{name}-int{bits}", shape, bits, 0)
    for name, shape in VARIANTS.items():
        yield from _integer_groups(f"{name}-int8", shape, 8, 0)
    yield from _integer_groups("llama-8b", _LLAMA, 8, 4)


def _integer_groups(config: str, shape: Shape, bits: int, num_exact: int) -> Iterator[Launch]:
    tile = key_tile(shape.dim, shape.rotary, shape.is_neox, row_bytes(shape, bits), shape.layers)
    shape = replace(shape, layers=tile.layers)  # those of one program
    keys = pool(shape, shape.dim)
    values = pool(shape, shape.v_dim) if shape.v_dim else None
    num_rows = num_exact or ROWS
    size = shape.layers * sections(keys, values, bits, num_rows, num_exact)[6]
    payload = torch.zeros(size, dtype=torch.uint8)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:num_rows]
    block, turn = Block(0, num_rows, num_exact, 0, num_rows, 0), rotation(shape)
    essential = [payload, *keys.views, *(values.views if values is not None else ())]
    for call in (encode, decode):

        def run(call: Callable = call) -> object:
            return call(payload, [block], keys, values, slots, bits, turn)

        suffix = {encode: "-encode", decode: "-decode"}[call] if num_exact else ""
        only = "copy_exact_kernel" if num_exact else ""
        yield Launch(config + suffix, num_rows * shape.layers, essential, run, only)
