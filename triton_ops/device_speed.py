"""How fast integer groups are encoded and decoded on a GPU, and restored from device and from pinned host memory.

Bandwidth is bytes of encoded rows and pool rows, each once, over time; ``copy`` is a torch copy of as many bytes, half
read and half written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from triton_ops import rope
from triton_ops.int_groups.blocks import Block, sections
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode
from triton_ops.int_groups.tiles import key_choice, value_choice
from triton_ops.paged import PagedPool
from triton_ops.report.cases import Shape

GEOMETRY = {"llama-3.1-8b": (32, 8, 128), "llama-3.1-70b-tp8": (80, 1, 128)}
TOKENS = (8192, 32768, 131072)
BLOCK_ROWS = 256


def pool(shape: Shape, dim: int, slots: int, device: torch.device) -> PagedPool:
    """Random rows, ``slots`` of them a layer."""
    pages = slots // shape.page
    form = (pages, shape.page, shape.heads, dim) if shape.layout == "nhd" else (pages, shape.heads, shape.page, dim)
    rows = [torch.randn(form, device=device).to(shape.dtype) for _ in range(shape.layers)]
    return PagedPool.nhd(rows) if shape.layout == "nhd" else PagedPool.hnd(rows)


def seconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call on the GPU, after two that do not count."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


@dataclass
class Load:
    """Encoded tokens of a model in scattered slots, as many layers as 8 GB of pool hold.

    Attributes:
        moved: bytes of encoded rows and of pool rows.
        share: of the model's layers.
    """

    keys: PagedPool
    values: PagedPool
    payload: torch.Tensor
    blocks: list[Block]
    slots: torch.Tensor
    bits: int
    turn: rope.Rotation
    moved: int
    share: float

    @staticmethod
    def of(name: str, tokens: int, bits: int, device: torch.device) -> Load:
        layers, heads, dim = GEOMETRY[name]
        group = min(layers, max(1, 2**33 // (tokens * heads * dim * 4)))
        shape = Shape(heads, dim, dim, dim, layers=group)
        keys, values = pool(shape, dim, tokens, device), pool(shape, dim, tokens, device)
        frequencies = 5e5 ** (-torch.arange(0, dim, 2, device=device) / dim)
        angles = torch.outer(torch.arange(tokens, device=device), frequencies)
        size = group * sections(keys, values, bits, BLOCK_ROWS, 0)[6]
        blocks = [Block(i * size, BLOCK_ROWS, 0, 0, BLOCK_ROWS, i * BLOCK_ROWS) for i in range(tokens // BLOCK_ROWS)]
        payload = torch.zeros(len(blocks) * size, dtype=torch.uint8, device=device)
        turn = rope.Rotation(torch.cat((angles.cos(), angles.sin()), 1).float())
        moved = len(payload) + 2 * group * keys.views[0].nbytes
        load = Load(
            keys, values, payload, blocks, torch.randperm(tokens, device=device), bits, turn, moved, group / layers
        )
        load.encode()
        return load

    def encode(self) -> None:
        encode(self.payload, self.blocks, self.keys, self.values, self.slots, self.bits, self.turn)

    def decode(self) -> None:
        decode(self.payload, self.blocks, self.keys, self.values, self.slots, self.bits, self.turn)


def tuned(name: str, bits: int, device: torch.device) -> dict[str, Any]:
    """The best tiles for 8192 tokens of a model and the milliseconds of every candidate; kept for later launches."""
    load = Load.of(name, TOKENS[0], bits, device)
    found = {}
    for call in (load.decode, load.encode):
        prefix = call.__name__
        choices = (
            key_choice(f"{prefix}_keys", load.keys, bits, load.keys.dim, True),
            value_choice(f"{prefix}_values", load.values, bits),
        )
        for choice in choices:
            best, times = choice.tune(partial(seconds, call, 5))
            shown = [None if time_s is None else round(time_s * 1e3, 4) for time_s in times]
            found[choice.kernel] = {"best": asdict(best), "candidates_ms": shown}
    return found


def bandwidth(name: str, tokens: int, bits: int, device: torch.device) -> dict[str, float]:
    """GB/s of encode and decode of ``tokens`` in scattered slots, and of a copy."""
    load = Load.of(name, tokens, bits, device)
    source = torch.empty(load.moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {
        "encode": seconds(load.encode),
        "decode": seconds(load.decode),
        "copy": seconds(lambda: target.copy_(source)),
    }
    return {what: load.moved / time_s / 1e9 for what, time_s in found.items()}


def restore_ms(name: str, bits: int, device: torch.device) -> dict[str, float]:
    """Milliseconds to restore 8192 tokens: from device memory, from pinned host memory, and as raw rows from there."""
    load = Load.of(name, TOKENS[0], bits, device)
    pinned = load.payload.cpu().pin_memory()
    raw = [view.cpu().pin_memory() for pools in (load.keys, load.values) for view in pools.views]
    staging = torch.empty_like(load.keys.views[0])

    def from_host() -> None:
        load.payload.copy_(pinned, non_blocking=True)
        load.decode()

    def raw_rows() -> None:
        for host, view in zip(raw, (*load.keys.views, *load.values.views), strict=True):
            staging.copy_(host, non_blocking=True)
            view.index_copy_(0, load.slots, staging)

    found = {"device": seconds(load.decode), "pinned": seconds(from_host), "raw": seconds(raw_rows)}
    return {what: time_s * 1e3 / load.share for what, time_s in found.items()}
