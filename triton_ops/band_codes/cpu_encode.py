"""Chooses width, scale and outliers of every band by rate and distortion, and packs.

A band takes the width and scale of least ``error + LAGRANGE * bits``, with the squared error in steps of the transform.
``LAGRANGE`` is the slope -dD/dR of a uniform quantiser of step 1 at high rate, 2 ln 2 / 12, so that fixed-width codes
stop where rounding to whole steps would. An outlier costs 32 bits, hence whatever is off by more than
``sqrt(32 LAGRANGE)`` = 1.92 steps becomes one.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from triton_ops.band_codes.reference import BAND, MAX_WIDTH, SCALE_BIAS, Bands, packed_bytes, scale_of

LAGRANGE = 2 * math.log(2) / 12
OUTLIER_BITS = 32
_THRESHOLD = LAGRANGE * OUTLIER_BITS

# scales to try, as multiples of the band's root mean square: around the best for normal and for Laplace components
_LOADS = np.array(
    [
        [0.0, 0.0, 0.0],
        [1.3, 1.6, 2.0],
        [0.8, 1.0, 1.3],
        [0.5, 0.65, 0.85],
        [0.28, 0.35, 0.5],
        [0.17, 0.22, 0.3],
        [0.1, 0.12, 0.14],
        [0.05, 0.06, 0.07],
        [0.03, 0.035, 0.04],
        [0.016, 0.018, 0.02],
        [0.008, 0.009, 0.01],
        [0.004, 0.0045, 0.005],
        [0.002, 0.0022, 0.0025],
    ],
    np.float32,
)
_SCALES = scale_of(np.arange(256, dtype=np.uint8))


@njit(nogil=True, cache=True, fastmath=True)
def _cost(values, scale, width):
    """Squared error of a band, what is an outlier counted at its price."""
    inverse, half = np.float32(1) / scale, np.float32(2 ** (width - 1))
    total = np.float32(0)
    for i in range(len(values)):
        level = np.floor(values[i] * inverse)
        level = min(max(level, -half), half - np.float32(1)) + np.float32(0.5)
        error = values[i] - level * scale
        total += min(error * error, np.float32(_THRESHOLD))
    return total


@njit(nogil=True, cache=True)
def _choose(values):
    """``(width, scale index)`` of one band."""
    count = len(values)
    square, zero_cost = 0.0, 0.0
    for i in range(count):
        one = float(values[i]) * float(values[i])
        square += one
        zero_cost += min(one, _THRESHOLD)
    best, best_width, best_index = zero_cost, 0, 0
    rms = math.sqrt(square / count)
    if rms < 1e-4:
        return 0, 0
    middle = math.floor(math.log2(rms)) + 3  # where the error of rounding is about that of whole steps
    for width in range(max(1, middle - 2), min(MAX_WIDTH, max(1, middle + 1)) + 1):
        tried = -1
        for load in _LOADS[width]:
            index = round(4 * math.log2(rms * load)) + SCALE_BIAS
            index = min(max(index, 0), 255)
            if index == tried:
                continue
            tried = index
            cost = _cost(values, _SCALES[index], width) + LAGRANGE * width * count
            if cost < best:
                best, best_width, best_index = cost, width, index
    return best_width, best_index


@njit(nogil=True, cache=True)
def _choose_all(components, widths, scales):
    rows = components.shape[0]
    values = np.empty(rows * BAND, np.float32)
    for band in range(len(widths)):
        for row in range(rows):
            for j in range(BAND):
                values[row * BAND + j] = components[row, band * BAND + j]
        widths[band], scales[band] = _choose(values)


@njit(nogil=True, cache=True)
def _write(components, widths, scales, packed, where, outliers, kept):
    """Pack all bands; returns the number of outliers, of which at most ``len(where)`` are written."""
    rows, at, count = components.shape[0], 0, 0
    for band in range(len(widths)):
        width, scale = int(widths[band]), _SCALES[scales[band]]
        inverse, half = np.float32(1) / scale, np.float32(2.0 ** (width - 1))
        for row in range(rows):
            buffer, held = np.uint64(0), 0
            for j in range(BAND):
                value = components[row, band * BAND + j]
                decoded = np.float32(0)
                if width:
                    level = min(max(np.floor(value * inverse), -half), half - np.float32(1))
                    decoded = (level + np.float32(0.5)) * scale
                    buffer |= np.uint64(int(level + half)) << np.uint64(held)
                    held += width
                    while held >= 8:
                        packed[at] = np.uint8(buffer & np.uint64(255))
                        buffer >>= np.uint64(8)
                        held -= 8
                        at += 1
                error = value - decoded
                if error * error > _THRESHOLD:
                    decoded = value
                    if count < len(where):
                        where[count] = (band * rows + row) * BAND + j
                        outliers[count] = value
                    count += 1
                kept[row, band * BAND + j] = decoded
    return count


def encode(components: np.ndarray) -> tuple[Bands, np.ndarray]:
    """Codes of one unit's components, and what a decoder makes of them.

    Args:
        components: float32 ``[rows, 16 * bands]``, in steps, magnitudes below 65504.

    Returns:
        The codes, and float32 of the shape of ``components``.
    """
    rows, width = components.shape
    widths, scales = np.zeros(width // BAND, np.uint8), np.zeros(width // BAND, np.uint8)
    _choose_all(components, widths, scales)
    kept = np.empty_like(components)
    packed: np.ndarray = np.empty(packed_bytes(widths, rows), np.uint8)
    room = 64 + components.size // 100
    while True:
        where: np.ndarray = np.empty(room, np.int64)
        outliers: np.ndarray = np.empty(room, np.float32)
        count = _write(components, widths, scales, packed, where, outliers, kept)
        if count <= room:
            break
        room = count
    where = where[:count]
    values: np.ndarray = outliers[:count].astype(np.float16)
    band, rest = np.divmod(where, rows * BAND)
    row, inside = np.divmod(rest, BAND)
    kept[row, band * BAND + inside] = values
    return Bands(rows, widths, scales, packed, where, values), kept
