"""Triton decoder of ``bands/1``; bit for bit what :func:`triton_ops.band_codes.reference.to_components` gives."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from triton_ops.band_codes.reference import BAND, Bands, scale_of

_BAND = tl.constexpr(BAND)
_ROWS, _OUTLIERS = 64, 256


@triton.jit
def unpack_kernel(
    packed_ptr, begins_ptr, widths_ptr, scales_ptr, out_ptr, start, num_rows, num_bands, ROWS: tl.constexpr
):
    """Components of one band, ``ROWS`` rows. A code of at most 12 bits lies within three bytes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < num_rows)[:, None]
    band = tl.program_id(1)
    width = tl.load(widths_ptr + band).to(tl.int32)
    component = tl.arange(0, _BAND)
    bit = component * width
    byte = (bit >> 3)[None, :]
    at = packed_ptr + tl.load(begins_ptr + band) + (row + start)[:, None] * (2 * width) + byte
    code = tl.load(at, mask=here & (byte < 2 * width), other=0).to(tl.int32)
    code |= tl.load(at + 1, mask=here & (byte + 1 < 2 * width), other=0).to(tl.int32) << 8
    code |= tl.load(at + 2, mask=here & (byte + 2 < 2 * width), other=0).to(tl.int32) << 16
    largest = (1 << width) - 1
    code = (code >> (bit & 7)[None, :]) & largest
    value = (code.to(tl.float32) - largest.to(tl.float32) * 0.5) * tl.load(scales_ptr + band)
    value = tl.where(width > 0, value, 0.0)
    tl.store(out_ptr + (row * num_bands + band)[:, None] * _BAND + component[None, :], value, mask=here)


@triton.jit
def outliers_kernel(
    where_ptr, values_ptr, out_ptr, num_outliers, block_rows, start, num_rows, num_bands, TILE: tl.constexpr
):
    """Put outliers of the wanted rows in place."""
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = number < num_outliers
    where = tl.load(where_ptr + number, mask=there, other=0)
    value = tl.load(values_ptr + number, mask=there, other=0.0).to(tl.float32)
    row = where // _BAND % block_rows - start
    band = where // _BAND // block_rows
    to = out_ptr + (row * num_bands + band) * _BAND + where % _BAND
    tl.store(to, value, mask=there & (row >= 0) & (row < num_rows))


def to_components(bands: Bands, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Rows ``start .. stop`` of a block, float32 ``[stop - start, 16 * bands]`` on ``device``.

    Raises:
        ValueError: rows outside the block.
        RuntimeError: a CPU without Triton's interpreter.
    """
    if not 0 <= start <= stop <= bands.rows:
        raise ValueError(f"band_codes: need 0 <= start <= stop <= {bands.rows} rows, got {start}..{stop}")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("triton_ops: a CPU needs Triton's interpreter, TRITON_INTERPRET=1")
    number, num_rows = len(bands.widths), stop - start
    out = torch.empty(num_rows, number * BAND, device=device)
    if not out.numel():
        return out
    sizes: np.ndarray = bands.widths.astype(np.int64) * (bands.rows * BAND // 8)
    packed, begins, widths, scales = (
        torch.from_numpy(np.array(part)).to(device)
        for part in (bands.packed, np.cumsum(sizes) - sizes, bands.widths, scale_of(bands.scales))
    )
    unpack_kernel[-(-num_rows // _ROWS), number](
        packed, begins, widths, scales, out, start, num_rows, number, ROWS=_ROWS, num_warps=4, enable_fp_fusion=False
    )
    if len(bands.where):
        where, values = (torch.from_numpy(np.array(part)).to(device) for part in (bands.where, bands.values))
        outliers_kernel[(-(-len(where) // _OUTLIERS),)](
            where, values, out, len(where), bands.rows, start, num_rows, number, TILE=_OUTLIERS, num_warps=4
        )
    return out
