"""A group's parameters and codes inside a kernel, bit for bit those of :mod:`triton_ops.int_groups.reference`."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_ops.int_groups.reference import FP16_MAX

_LARGEST = tl.constexpr(FP16_MAX)


@triton.jit
def _half_bits(x):
    """Bits of the nearest float16, zero as +0, and that number as float32."""
    nearest = (x + 0.0).to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    return tl.where(nearest.to(tl.float32) == 0.0, tl.zeros_like(bits), bits), nearest.to(tl.float32)


@triton.jit
def _half_of(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def low_and_scale(smallest, largest, TOP: tl.constexpr):
    """The float16 ``low`` and ``scale`` of a group, then as float32 ``low`` and ``1 / scale`` (0 for a scale of 0)."""
    bits, nearest = _half_bits(smallest)
    bits = bits.to(tl.int32)
    below = tl.where(bits > 0, bits - 1, bits + 1)
    below = tl.where(bits == 0, -0x7FFF, below)
    low16 = _half_of(tl.where(nearest > smallest, below, bits))
    low = low16.to(tl.float32)
    step = (largest - low) * (1.0 / TOP)
    bits, nearest = _half_bits(step)
    scale16 = _half_of(tl.where(nearest < step, bits.to(tl.int32) + 1, bits.to(tl.int32)))
    scale = scale16.to(tl.float32)
    per_step = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
    return low16, scale16, low, per_step


@triton.jit
def to_codes(x, low, per_step, TOP: tl.constexpr):
    """uint8 codes of float32 ``x`` by the stored parameters."""
    return tl.minimum(tl.floor((x - low) * per_step + 0.5), TOP).to(tl.int32).to(tl.uint8)


@triton.jit
def column_params(x, mask, TOP: tl.constexpr):
    """Parameters of the group that each column is, and whether all of ``x`` can be encoded."""
    fine = tl.abs(x) <= _LARGEST  # false for NaN
    good = tl.min((fine | ~mask).to(tl.int32))
    x = tl.where(fine, x, 0.0)
    smallest = tl.min(tl.where(mask, x, _LARGEST), axis=0)
    largest = tl.max(tl.where(mask, x, -_LARGEST), axis=0)
    low16, scale16, low, per_step = low_and_scale(smallest, largest, TOP)
    return low16, scale16, low, per_step, good
