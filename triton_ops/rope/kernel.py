"""Rotation inside a kernel, channel by channel: ``x cos + partner (+-sin)``, each operation rounded to fp32.

Kernels that call these must be compiled with ``enable_fp_fusion=False``; a fused multiply-add rounds once where the
specification, :mod:`triton_ops.rope.reference`, rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partner(channel, ROTARY: tl.constexpr, NEOX: tl.constexpr):
    """The channel that turns with ``channel``; itself where it does not turn."""
    other = channel ^ 1
    if NEOX:
        other = tl.where(channel < ROTARY // 2, channel + ROTARY // 2, channel - ROTARY // 2)
    return tl.where(channel < ROTARY, other, channel)


@triton.jit
def table_tile(table_ptr, row, channel, mask, ROTARY: tl.constexpr, NEOX: tl.constexpr, INVERSE: tl.constexpr):
    """``(cos, sin)`` of rows and channels, ``[rows, channels]``: sin with the sign that ``channel`` adds it with.

    Channels that do not turn have (1, 0) and must be left alone by the caller: ``-0 * 1 + 0`` is +0.
    """
    turns = mask & (channel < ROTARY)[None, :]
    if NEOX:
        column = tl.where(channel < ROTARY // 2, channel, channel - ROTARY // 2)
        is_first = channel < ROTARY // 2
    else:
        column = channel // 2
        is_first = channel % 2 == 0
    at = table_ptr + row[:, None] * ROTARY + column[None, :]
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + ROTARY // 2, mask=turns, other=0.0)
    if INVERSE:
        return cos, tl.where(is_first[None, :], sin, -sin)
    return cos, tl.where(is_first[None, :], -sin, sin)


@triton.jit
def turn(x, other, cos, sin, channel, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """``x`` turned against its partner, both float32 ``[rows, channels]``."""
    turned = x * cos + other * sin
    if ROTARY == DIM:
        return turned
    return tl.where((channel < ROTARY)[None, :], turned, x)


@triton.jit
def exchange(x, DISTANCE: tl.constexpr):
    """``x`` ``[rows, channels]`` with channels ``j`` and ``j ^ DISTANCE`` exchanged; ``DISTANCE`` a power of two."""
    ROWS: tl.constexpr = x.shape[0]
    CHANNELS: tl.constexpr = x.shape[1]
    if DISTANCE == 1:
        first, second = tl.split(tl.reshape(x, (ROWS, CHANNELS // 2, 2)))
        return tl.reshape(tl.join(second, first), (ROWS, CHANNELS))
    pairs = tl.permute(tl.reshape(x, (ROWS, CHANNELS // (2 * DISTANCE), 2, DISTANCE)), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(second, first), (0, 1, 3, 2)), (ROWS, CHANNELS))


def exchange_distance(dim: int, rotary: int, is_neox: bool, channels: int) -> int:
    """The distance of :func:`exchange` that finds the partners within tiles of ``channels`` of either half of a head.

    0 where a pair has a channel in each half, at the same place, or lies across tiles in another way.
    """
    if rotary == 0 or (is_neox and rotary == dim):
        return 0
    distance = rotary // 2 if is_neox else 1
    inside = dim // 2 % 2 == 0 if distance == 1 else rotary <= dim // 2
    return distance if inside and distance & (distance - 1) == 0 and channels % (2 * distance) == 0 else 0
