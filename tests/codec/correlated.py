"""Rows whose layers follow from one another, and profiles fitted to them, for the tests of profiled codecs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec import (
    PoolRows,
    Profile,
    ProfileInfo,
    Rotary,
    RowLayout,
    TokenEmbedding,
    decode_block,
    encode_block,
    make_codec,
)
from sglang_plt.codec.rows import layer_rows
from tests.codec.pools import NAN, NUM_SLOTS, make_rotary, some_slots

MODEL = 17
STEP = 0.25
CHANNELS = 0.3, 3.0  # smallest and largest standard deviation that a layer adds


@dataclass(frozen=True)
class Source:
    """A pool layout, and rows for it: layer ``l + 1`` is a fixed mix of layer ``l``, plus noise and a mean.

    Attributes:
        noise: standard deviation of what no layer says about the next one, as a share of the row.
    """

    layers: int = 3
    heads: int = 2
    dim: int = 16
    v_dim: int = 16
    dtype: torch.dtype = torch.float32
    noise: float = 0.1

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.layers, self.heads, self.dim, self.v_dim, self.dtype)

    @property
    def width(self) -> int:
        return self.heads * (self.dim + self.v_dim)

    def rows(self, count: int, seed: int) -> list[torch.Tensor]:
        """float32 ``[count, width]`` a layer, keys without rotation first."""
        fixed, fresh = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
        spread = torch.linspace(*CHANNELS, self.width)
        row = torch.randn(count, self.width, generator=fresh) * spread
        found = [row]
        for _ in range(1, self.layers):
            mix = torch.linalg.qr(torch.randn(self.width, self.width, generator=fixed)).Q
            fresh_part = self.noise * row.norm(dim=1).mean() / self.width**0.5
            row = row @ mix + fresh_part * torch.randn(count, self.width, generator=fresh)
            found.append(row)
        means = [2 * torch.randn(self.width, generator=fixed) for _ in found]
        return [row + mean for row, mean in zip(found, means, strict=True)]

    def empty(self, fill: float = NAN, slots: int = NUM_SLOTS) -> PoolRows:
        shapes = ((self.heads, self.dim), (self.heads, self.v_dim))
        buffers = [tuple(torch.full((slots, *s), fill).to(self.dtype) for _ in range(self.layers)) for s in shapes]
        return PoolRows(self.layout, *buffers)

    def pool(self, rows: list[torch.Tensor], slots: torch.Tensor, rotary: Rotary | None, position: int) -> PoolRows:
        """A pool of NaN with ``rows`` in ``slots``, keys rotated to consecutive positions."""
        pool, at = self.empty(), torch.arange(position, position + len(slots))
        for layer, row in enumerate(rows):
            keys, values = row.split((self.heads * self.dim, self.heads * self.v_dim), 1)
            keys = keys.reshape(len(row), self.heads, self.dim)
            keys = keys if rotary is None else rotary.apply(keys, at)
            pool.keys[layer][slots] = keys.to(self.dtype)
            pool.values[layer][slots] = values.reshape(len(row), self.heads, self.v_dim).to(self.dtype)
        return pool


@cache
def profile_of(
    source: Source,
    codec: str,
    rotated: bool = False,
    group: int = 1,
    predicts: bool = True,
    seed: int = 100,
    hidden: int = 0,
    says: float = 0.0,
) -> Profile:
    """A profile of ``source`` whose error is that of a step of :data:`STEP` in every direction."""
    moments = Moments(source.layers, source.width, group, hidden, 1)
    rows, tokens = source.rows(4000, seed), some_tokens(4000, seed)
    if says:
        rows[0] += says * of_tokens(source, tokens)
    moments.add(rows, some_embedding(hidden)(tokens) if hidden else None)
    info = ProfileInfo(
        codec=codec,
        model="correlated",
        dtype=str(source.dtype).removeprefix("torch."),
        num_layers=source.layers,
        kv_heads=source.heads,
        head_dim=source.dim,
        v_head_dim=source.v_dim,
        group=group,
        keys_rotated=rotated,
        step=STEP,
        scale=1.13 if codec == "dense" else 1.0,  # whose error is that of rounding, of components well above a step
        tokens=moments.count,
        sensitivity="kind",
        predicts=predicts,
        hidden=hidden,
        token_layers=1,
    )
    return make_profile(info, moments, lambda unit: torch.eye(len(unit) * source.width, dtype=torch.float64))


HIDDEN = 24
VOCABULARY = 40


def some_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count)


@cache
def some_embedding(hidden: int = HIDDEN) -> TokenEmbedding:
    weight = torch.randn(VOCABULARY, hidden, generator=torch.Generator().manual_seed(5))
    return TokenEmbedding(weight, torch.device("cpu"))


def of_tokens(source: Source, tokens: np.ndarray, hidden: int = HIDDEN) -> torch.Tensor:
    """Something about rows of the first layer, ``[n, width]``, with deviations of 1, that tokens say."""
    mix = torch.randn(hidden, source.width, generator=torch.Generator().manual_seed(6))
    return some_embedding(hidden)(tokens) @ mix / hidden**0.5


SOURCE = Source()
ROTARY = make_rotary(16)
NAMES = ("fast", "dense", "hadamard")


def round_trip(name, source, rows, rotary, position=300, profile=None, start=0, stop=None, moved=0):
    """Encode ``rows`` as a block at ``position`` and decode ``start .. stop`` of it, ``moved`` positions on.

    Returns the block and, as of :func:`read`, the rows that were stored and those that came back.
    """
    profile = profile_of(source, name, rotary is None) if profile is None else profile
    slots, stop = some_slots(len(rows[0])), len(rows[0]) if stop is None else stop
    pool, target, where = source.pool(rows, slots, rotary, position), source.empty(), some_slots(stop - start, seed=2)
    block = encode_block(make_codec(name, pool, rotary, profile), MODEL, slots, position)
    decode_block(make_codec(name, target, rotary, profile), MODEL, block, start, stop, where, position + moved)
    stored = read(pool, slots[start:stop], rotary, position + start)
    return block, stored, read(target, where, rotary, position + moved + start)


def read(pool: PoolRows, slots: torch.Tensor, rotary: Rotary | None, position: int) -> torch.Tensor:
    """float32 ``[layers, rows, width]``, keys without rotation."""
    return torch.stack(layer_rows(pool, rotary, slots, position))


def bits(block: np.ndarray, source: Source, num_rows: int) -> float:
    """Bits a number of the rows, header included."""
    return 8 * len(block) / (source.layers * source.width * num_rows)
