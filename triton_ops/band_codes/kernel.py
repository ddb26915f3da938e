"""Triton decoder of ``bands/1``; bit for bit what :func:`triton_ops.band_codes.reference.to_components` gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from triton_ops.band_codes.reference import BAND, Bands, scale_of

_BAND = tl.constexpr(BAND)
_ROWS, _OUTLIERS = 64, 256


@triton.jit
def unpack_kernel(
    words_ptr, begins_ptr, widths_ptr, scales_ptr, out_ptr, start, num_rows, num_bands, ROWS: tl.constexpr
):
    """Components of one band, ``ROWS`` rows: as many 16-bit words as a code has bits, each read once."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = (row < num_rows)[:, None]
    band = tl.program_id(1)
    width = tl.load(widths_ptr + band).to(tl.int32)
    component = tl.arange(0, _BAND)
    at = words_ptr + tl.load(begins_ptr + band) + (row + start)[:, None] * width + component[None, :]
    words = tl.load(at, mask=here & (component < width)[None, :], other=0).to(tl.int32) & 0xFFFF
    bit = component * width
    first = tl.broadcast_to((bit >> 4)[None, :], (ROWS, _BAND))
    code = tl.gather(words, first, 1) | tl.gather(words, first + 1, 1) << 16
    largest = (1 << width) - 1
    code = (code >> (bit & 15)[None, :]) & largest
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


@dataclass(frozen=True)
class DeviceBands:
    """:class:`Bands` on a device.

    Attributes:
        rows: number of rows.
        packed: int16 ``[words]``.
        begins, widths: int64 and uint8 ``[bands]``, the first word of a band and the bits of its codes.
        scales: float32 ``[bands]``.
        where, values: int64 and float16 ``[outliers]``.
    """

    rows: int
    packed: torch.Tensor
    begins: torch.Tensor
    widths: torch.Tensor
    scales: torch.Tensor
    where: torch.Tensor
    values: torch.Tensor


def upload(bands: Bands, device: torch.device) -> DeviceBands:
    """Copy a unit's codes to ``device``."""
    sizes: np.ndarray = bands.widths.astype(np.int64) * bands.rows
    parts = (
        *(np.array(bands.packed).view(np.int16), np.cumsum(sizes) - sizes, bands.widths, scale_of(bands.scales)),
        *(bands.where, bands.values),
    )
    return DeviceBands(bands.rows, *(torch.from_numpy(np.array(part)).to(device) for part in parts))


def to_components(bands: DeviceBands, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows ``start .. stop`` of a block, float32 ``[stop - start, 16 * bands]``.

    Args:
        out: where to write them, contiguous; None for a new tensor.

    Raises:
        ValueError: rows outside the block, or an ``out`` that is not as above.
        RuntimeError: a CPU without Triton's interpreter.
    """
    if not 0 <= start <= stop <= bands.rows:
        raise ValueError(f"band_codes: need 0 <= start <= stop <= {bands.rows} rows, got {start}..{stop}")
    number, num_rows, device = len(bands.widths), stop - start, bands.widths.device
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError("triton_ops: a CPU needs Triton's interpreter, TRITON_INTERPRET=1")
    shape = (num_rows, number * BAND)
    out = torch.empty(shape, device=device) if out is None else out
    if out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"band_codes: out must be contiguous float32 {shape}, got {out.dtype} {tuple(out.shape)}")
    if not out.numel():
        return out
    unpack_kernel[-(-num_rows // _ROWS), number](
        bands.packed, bands.begins, bands.widths, bands.scales, out, start, num_rows, number,
        ROWS=_ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if len(bands.where):
        outliers_kernel[(-(-len(bands.where) // _OUTLIERS),)](
            bands.where, bands.values, out, len(bands.where), bands.rows, start, num_rows, number,
            TILE=_OUTLIERS, num_warps=4,
        )  # fmt: skip
    return out
