"""The tiles that launches take: by shape, or as :mod:`triton_ops.tuning` found best on this GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triton_ops.int_groups.config import Tile, candidates, key_tile, value_tile
from triton_ops.int_groups.kernel_exact import row_bytes, shape_of
from triton_ops.paged import PagedPool
from triton_ops.tuning import chosen, device_name, tune


@dataclass(frozen=True)
class Choice:
    """Tiles that a kernel may take over a pool.

    Attributes:
        kernel: its name.
        shape: what it is compiled for.
        tiles: the default first.
        device: :func:`triton_ops.tuning.device_name`.
    """

    kernel: str
    shape: str
    tiles: list[Tile]
    device: str

    def pick(self) -> Tile:
        return chosen(self.kernel, self.shape, self.tiles, self.device)

    def tune(self, seconds: Callable[[], float]) -> tuple[Tile, list[float | None]]:
        """As :func:`triton_ops.tuning.tune`."""
        return tune(self.kernel, self.shape, self.tiles, self.device, seconds)


def key_choice(kernel: str, pool: PagedPool, bits: int, rotary: int, neox: bool) -> Choice:
    tile = key_tile(pool.dim, rotary, neox, row_bytes(pool, bits), pool.num_layers)
    return _choice(kernel, pool, bits, tile, f" rotary {rotary} {'neox' if neox else 'gptj'}")


def value_choice(kernel: str, pool: PagedPool, bits: int) -> Choice:
    return _choice(kernel, pool, bits, value_tile(pool.dim), "")


def _choice(kernel: str, pool: PagedPool, bits: int, tile: Tile, more: str) -> Choice:
    shape = " ".join(f"{name.lower()} {number}" for name, number in shape_of(pool, bits).items())
    shape = f"layers {pool.num_layers} {shape}{more}"
    return Choice(kernel, shape, candidates(tile, pool.num_layers), device_name(pool.device))
