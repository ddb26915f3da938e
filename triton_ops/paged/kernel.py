"""What kernels over a paged pool share: the address of a slot, and elements from and to float32.

Types that Triton's interpreter or an older GPU converts differently travel as their bits and are converted by integer
operations, so every backend gives the bits of :func:`triton_ops.paged.reference.to_pool`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_ops.paged.pool import DTYPES, PagedPool

FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
E4M3 = tl.constexpr(3)

CARRIERS = {0: torch.float32, 1: torch.int16, 2: torch.float16, 3: torch.uint8, 4: torch.uint8}
"""The type by which a kernel holds elements of a kind."""


@triton.jit
def layer_pointer(pool_ptr, offsets_ptr, layer, ALIGN: tl.constexpr):
    """The buffer of a layer, ``ALIGN`` (:attr:`PagedPool.align`) times a whole number of elements behind the first.

    An offset and not an address: what divides an address is lost when an integer becomes a pointer.
    """
    return pool_ptr + tl.multiple_of(tl.load(offsets_ptr + layer), ALIGN)


@triton.jit
def slot_offset(slot, page_stride, place_stride, PAGE: tl.constexpr):
    """Elements in front of the row of an int64 ``slot``."""
    if PAGE == 1:
        return slot * page_stride
    return slot // PAGE * page_stride + slot % PAGE * place_stride


@triton.jit
def _round_bits(x, DROP: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, MAGIC: tl.constexpr):
    """Magnitude of float32 to a float with ``23 - DROP`` bits of mantissa, to nearest even, saturating."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, LARGEST)
    # adding a number whose last mantissa bit is the format's least subnormal lets the hardware round to it
    small = (bits.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
    magic = (tl.zeros_like(x) + MAGIC).to(tl.int32, bitcast=True)
    normal = (bits - (BIAS << 23) + ((1 << (DROP - 1)) - 1) + ((bits >> DROP) & 1)) >> DROP
    return tl.where(bits < ((BIAS + 1) << 23), small - magic, normal)


@triton.jit
def to_pool(x, KIND: tl.constexpr):
    """Finite float32 to the pool's element, to nearest even; float16 and float8 saturate."""
    if KIND == FLOAT32:
        return x
    elif KIND == BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == FLOAT16:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    else:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        if KIND == E4M3:
            return (_round_bits(x, 20, 120, 0x43E00000, 16384.0) | sign).to(tl.uint8)  # 448
        return (_round_bits(x, 21, 112, 0x47600000, 128.0) | sign).to(tl.uint8)  # 57344


@triton.jit
def to_float(x, KIND: tl.constexpr):
    """The pool's element to float32, exact; what is not finite stays so."""
    if KIND == FLOAT32:
        return x
    elif KIND == BFLOAT16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT16:
        return x.to(tl.float32)
    else:
        bits = x.to(tl.int32)
        sign = (bits & 0x80) << 24
        magnitude = bits & 0x7F
        if KIND == E4M3:
            normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
            value = tl.where(magnitude == 0x7F, float("nan"), value)
        else:
            normal = ((magnitude << 21) + (112 << 23)).to(tl.float32, bitcast=True)
            value = tl.where(magnitude < 4, magnitude.to(tl.float32) * 0.0000152587890625, normal)
            value = tl.where(magnitude >= 0x7C, float("inf"), value)
        return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


def carried(pool: PagedPool) -> torch.Tensor:
    """The first buffer, elements as kernels hold them."""
    return pool.views[0].view(CARRIERS[DTYPES[pool.dtype]])


def launch_device(pool: PagedPool) -> torch.device:
    """Where a kernel over ``pool`` runs.

    Raises:
        RuntimeError: on a CPU without Triton's interpreter.
    """
    if pool.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("triton_ops: a pool on a CPU needs Triton's interpreter, TRITON_INTERPRET=1")
    return pool.device
