"""How the Triton kernels cut a row: by shape alone, so every configuration can be compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass, replace

KEY_ROWS = 64
"""A program of the key kernels takes one group, so that parameters are read or made once."""


@dataclass(frozen=True)
class Tile:
    """Of one program.

    Attributes:
        rows: power of two.
        channels: of the lower half of a head, power of two; as many of the upper half go with them.
        steps: programs beside each other that cover the lower half.
        layers: one after the other in a program.
        warps: of 32 threads.
    """

    rows: int
    channels: int
    steps: int
    layers: int
    warps: int


def key_tile(dim: int, rotary: int, is_neox: bool, row_bytes: int, num_layers: int) -> Tile:
    """For keys: 64 rows; 16 channels of each half a thread, or 8 where partners are not in the other half.

    Args:
        row_bytes: codes and pool elements of a row in one layer; a program takes as many layers as make the rotation's
            table, read once, at most a 25th of what it moves.
    """
    half = dim // 2
    together = rotary == 0 or (is_neox and rotary == dim)
    channels = min(64 if together else 32, _power_at_least(half))
    while channels > 16 and half % channels:
        channels //= 2
    if half % channels:
        channels = min(64, _power_at_least(half))
    programs = max(1, num_layers * row_bytes // (25 * 4 * rotary) if rotary else num_layers // 4)
    return Tile(KEY_ROWS, channels, -(-half // channels), -(-num_layers // programs), max(1, channels // 8))


def value_tile(dim: int) -> Tile:
    """For values: whole heads, 2048 channels of each half a program."""
    channels = _power_at_least(dim // 2)
    rows = max(1, min(64, 4096 // channels))
    return Tile(rows, channels, 1, 2, 8)


def candidates(default: Tile, num_layers: int) -> list[Tile]:
    """``default`` and its neighbours: other layers and warps."""
    layers = dict.fromkeys((default.layers, max(1, default.layers // 2), min(num_layers, default.layers * 2)))
    warps = dict.fromkeys((default.warps, max(1, default.warps // 2), min(8, default.warps * 2)))
    return [replace(default, layers=a, warps=b) for a in layers for b in warps]


def _power_at_least(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
