"""Unpacks band codes; bit for bit what :func:`triton_ops.band_codes.reference.to_components` gives."""

from __future__ import annotations

import numpy as np
from numba import njit

from triton_ops.band_codes.reference import BAND, Bands, scale_of


@njit(nogil=True, cache=True)
def _unpack(packed, offsets, widths, scales, start, stop, out):
    for band in range(len(widths)):
        width = int(widths[band])
        if width == 0:
            for row in range(stop - start):
                out[row, band * BAND : band * BAND + BAND] = 0
            continue
        scale, middle = scales[band], np.float32((2**width - 1) / 2)
        mask = np.uint64((1 << width) - 1)
        for row in range(start, stop):
            first = offsets[band] + row * 2 * width
            buffer, held, byte = np.uint64(0), 0, 0
            for j in range(BAND):
                while held < width:
                    buffer |= np.uint64(packed[first + byte]) << np.uint64(held)
                    byte += 1
                    held += 8
                code = buffer & mask
                buffer >>= np.uint64(width)
                held -= width
                out[row - start, band * BAND + j] = (np.float32(code) - middle) * scale


def decode(bands: Bands, start: int, stop: int, wanted: np.ndarray | None = None) -> np.ndarray:
    """Rows ``start .. stop`` of all bands, or of those ``wanted``, float32 ``[stop - start, 16 * bands]``.

    Args:
        wanted: int64, ascending numbers of bands; every band with an outlier must be among them.
    """
    if wanted is None:
        wanted = np.arange(len(bands.widths))
    ends = np.cumsum(bands.widths, dtype=np.int64) * (bands.rows * BAND // 8)
    offsets = (ends - bands.widths.astype(np.int64) * (bands.rows * BAND // 8))[wanted]
    out: np.ndarray = np.empty((stop - start, BAND * len(wanted)), np.float32)
    packed = bands.packed.view()
    packed.flags.writeable = False  # one compiled variant
    _unpack(packed, offsets, bands.widths[wanted], scale_of(bands.scales[wanted]), start, stop, out)
    band, rest = np.divmod(bands.where, bands.rows * BAND)
    row, inside = np.divmod(rest, BAND)
    shown = (row >= start) & (row < stop)
    place = np.searchsorted(wanted, band[shown])
    out[row[shown] - start, place * BAND + inside[shown]] = bands.values[shown]
    return out
