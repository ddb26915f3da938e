"""How the Triton kernels cut a row: by shape alone, so every configuration can be compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

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


def key_tile(dim: int, rotary: int, is_neox: bool) -> Tile:
    """For keys: 64 rows; 16 channels of each half a thread, or 8 where partners are read apart."""
    half = dim // 2
    together = rotary == 0 or (is_neox and rotary == dim)
    channels = min(64 if together else 32, _power_at_least(half))
    while channels > 16 and half % channels:
        channels //= 2
    if half % channels:
        channels = min(64, _power_at_least(half))
    return Tile(KEY_ROWS, channels, -(-half // channels), 4, max(1, channels // 8))


def value_tile(dim: int) -> Tile:
    """For values: whole heads, 2048 channels of each half a program."""
    channels = _power_at_least(dim // 2)
    rows = max(1, min(64, 4096 // channels))
    return Tile(rows, channels, 1, 2, 8)


def _power_at_least(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
