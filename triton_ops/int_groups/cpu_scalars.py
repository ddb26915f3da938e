"""Scalar conversions for the CPU kernels, written with integer operations so that LLVM vectorises them everywhere.

Numba has no float16 or bfloat16 arithmetic on a CPU; both travel as their 16 bits in an integer. LLVM inlines every
function into its caller, so a loop over one of them compiles to vector code.

Numba's on-disk cache watches the file of the kernel only: after an edit here, delete ``__pycache__``.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Kinds of pool element the kernels are compiled for."""

_DENORMAL = np.float32(2.0**-14)  # the smallest normal float16
_SMALLEST_NORMAL = 113 << 23  # its float32 bits
_FP16_MAX_BITS = 0x477FE000  # 65504.0
_HALF = 126 << 23  # 0.5: adding it aligns a float16 subnormal with the low bits of the float32 mantissa

AHEAD = 8
"""Rows between a prefetch and its use."""


@intrinsic
def pointer(typingctx, address):
    """An integer address as ``void*``, for ``numba.carray``."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), codegen


@njit
def buffer_views(address, num_bytes):
    """A pool buffer as flat uint8, uint16 and float32; the kernels use the views that fit its element."""
    return (
        carray(pointer(address), num_bytes, np.uint8),
        carray(pointer(address), num_bytes // 2, np.uint16),
        carray(pointer(address), num_bytes // 4, np.float32),
    )


@intrinsic
def _prefetch(typingctx, address):
    def codegen(context, builder, signature, args):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        line = builder.inttoptr(args[0], byte)
        builder.call(function, [line, ir.Constant(word, 1), ir.Constant(word, 3), ir.Constant(word, 1)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@njit
def prefetch_row(address, num_bytes):
    """Ask for the cache lines of a pool row ahead of use: scattered rows cost a memory latency each otherwise."""
    for at in range(0, num_bytes, 64):
        _prefetch(address + at)


@intrinsic
def bits_of(typingctx, value):
    """A float32 as its bits, int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """The float32 with these bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit
def half_to_float(bits):
    """float16 bits (uint16) to float32; exact for finite values, which is all an encoder stores."""
    magnitude = np.int32((np.int32(bits) & np.int32(0x7FFF)) << np.int32(13))
    value = float_of(np.int32(magnitude + np.int32(112 << 23)))
    small = float_of(np.int32(magnitude + np.int32(_SMALLEST_NORMAL))) - _DENORMAL
    if magnitude < np.int32(1 << 23):
        value = small
    sign = np.int32((np.int32(bits) & np.int32(0x8000)) << np.int32(16))
    return float_of(np.int32(bits_of(value) | sign))


@njit
def float_to_half(x):
    """float32 to float16 bits, to nearest even, saturating at +-65504; NaN gives unspecified bits."""
    u = bits_of(x)
    sign = np.int32(u >> np.int32(16)) & np.int32(0x8000)
    u = np.int32(min(np.int32(u & np.int32(0x7FFFFFFF)), np.int32(_FP16_MAX_BITS)))
    small = np.int32(bits_of(float_of(u) + np.float32(0.5)) - np.int32(_HALF))
    odd = np.int32(np.int32(u >> np.int32(13)) & np.int32(1))
    rounded = np.int32(np.int32(u - np.int32(112 << 23) + np.int32(0xFFF) + odd) >> np.int32(13))
    if u < np.int32(_SMALLEST_NORMAL):
        rounded = small
    return np.uint16(rounded | sign)


@njit
def float_to_bfloat(x):
    """float32 to bfloat16 bits, to nearest even; NaN gives unspecified bits."""
    u = bits_of(x)
    odd = np.int32(np.int32(u >> np.int32(16)) & np.int32(1))
    return np.uint16(np.int32(u + np.int32(0x7FFF) + odd) >> np.int32(16))


@njit
def bfloat_to_float(bits):
    """bfloat16 bits (uint16) to float32; exact."""
    return float_of(np.int32(np.int32(bits) << np.int32(16)))


@njit
def order(x):
    """float32 to an int32 that sorts like the number: integer minima vectorise, float minima do not (NaN)."""
    i = bits_of(x)
    return np.int32(i ^ np.int32(np.int32(i >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit
def unorder(i):
    """Inverse of :func:`order`."""
    return float_of(np.int32(i ^ np.int32(np.int32(i >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit
def half_at_most(x):
    """Bits of the largest float16 that is not above ``x``, ``|x| <= 65504``; zero is +0."""
    bits = np.int32(float_to_half(x + np.float32(0.0)))
    if half_to_float(bits) > x:
        if bits == 0:
            bits = np.int32(0x8001)
        elif bits < 0x8000:
            bits = np.int32(bits - 1)
        else:
            bits = np.int32(bits + 1)
    return np.uint16(bits)


@njit
def half_at_least(x):
    """Bits of the smallest float16 that is not below ``x``, ``0 <= x < 65504``; zero is +0."""
    bits = np.int32(float_to_half(x + np.float32(0.0)))
    if half_to_float(bits) < x:
        bits = np.int32(bits + 1)
    return np.uint16(bits)
