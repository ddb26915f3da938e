"""Classes of scale and their integer models, the same on every machine; FORMAT.md is normative.

A class is the scale of a logistic variable, a quarter of an octave apart. That shape fits the residuals of a prediction
better than Laplace's, and its distribution function is closed, so decimal arithmetic gives every model exactly. Bins of
0 and scales are a little narrower than the quantisers', by what levels of calibration text show.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

import numpy as np

BAND = 16
"""Neighbouring components that share a class."""
PRECISION = 12
"""Probabilities are multiples of 2**-12."""
NUM_CLASSES = 52
"""Class 0 is all zeros; class c has a mean magnitude of ``2**((c - 1) / 4 - 4)`` steps, 0.06 to 362."""
FIRST_TRELLIS = 10
"""Bands of this class and above are trellis-coded; below a mean magnitude of 0.3 steps that gains nothing."""
MOST_SHIFT = 6
"""Classes by which a row's own energy moves the class of a band, at most."""
RATIO_BITS = 6
ENERGY_FLOOR = 4096
ENERGY_DECAY = 4
"""A row's energy loses a sixteenth with every band."""
LARGEST = 16383
"""Largest magnitude of a component, in steps."""

NEXT = np.array([[0, 2], [5, 7], [1, 3], [6, 4], [2, 0], [4, 6], [3, 1], [7, 5]], np.int64)
"""State that follows a state, by the parity of the level; odd states use the quantiser with shifted levels."""

_MOST_LEVEL = 31
_LARGE = 14
# by quantiser: half the width of the bin of 0, and classes that the scale is below that of the class
_SMALL_BINS = ((Decimal("0.45"), Decimal(1)), (Decimal("0.175"), Decimal(1)))
_LARGE_BINS = ((Decimal("0.425"), Decimal(0)), (Decimal("0.225"), Decimal("0.5")))
_DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN, Emin=-999999, Emax=999999, clamp=0, flags=[], traps=[])


def scale(cls: int | Decimal) -> Decimal:
    """Mean magnitude of a class above 0, in steps."""
    return Decimal(2) ** ((Decimal(cls) - 1) / 4 - 4)


def low_bits(cls: int) -> int:
    """Lowest bits of a level that are stored as they are: those of scales above 4 steps are as good as random."""
    return max(0, -(-(cls - 25) // 4))


@cache
def limit(cls: int) -> int:
    """Levels without their low bits reach from ``-limit`` to ``limit``; what lies outside is an escape."""
    with localcontext(_DECIMAL):
        return _MOST_LEVEL if low_bits(cls) else min(_MOST_LEVEL, int(7 * scale(cls)) + 2)


def frequencies(weights: list[Decimal]) -> np.ndarray:
    """Integers above 0 that sum to 2**12, proportional to ``weights`` up to rounding; the largest absorbs the rest."""
    total = sum(weights)
    counts = [max(1, int(weight / total * (1 << PRECISION))) for weight in weights]
    counts[counts.index(max(counts))] += (1 << PRECISION) - sum(counts)
    return np.array(counts, np.int64)


@cache
def level_frequencies(cls: int, quantiser: int) -> np.ndarray:
    """Of the levels ``-limit .. limit`` of a class without their low bits, then of an escape."""
    with localcontext(_DECIMAL):
        top, step = limit(cls), 1 << low_bits(cls)
        zero, lower = (_LARGE_BINS if cls >= _LARGE else _SMALL_BINS)[quantiser]
        spread = scale(cls - lower) / (2 * Decimal(2).ln())

        def up_to(level: int) -> Decimal:
            """Probability of ``level`` and all below."""
            if level < 0:
                return 1 - up_to(-1 - level)
            edge = level + Decimal("0.5") * (1 - quantiser) if level else zero
            return 1 / (1 + (-edge / spread).exp())

        weights = [up_to(level * step + step - 1) - up_to(level * step - 1) for level in range(-top, top + 1)]
        return frequencies([*weights, 1 - sum(weights, Decimal(0))])


@cache
def class_frequencies() -> np.ndarray:
    """Of the difference to the class of the band before, modulo the number of classes; small ones are likely."""
    with localcontext(_DECIMAL):
        distances = [min(step, NUM_CLASSES - step) for step in range(NUM_CLASSES)]
        return frequencies([Decimal(2) ** -distance for distance in distances])


@cache
def costs() -> np.ndarray:
    """``[3, classes]`` bits: of a zero, of a level that is not, and of every unit of its magnitude beyond the first."""
    found = np.zeros((3, NUM_CLASSES))
    found[:, 0] = 0, 1e9, 1e9
    for cls in range(1, NUM_CLASSES):
        spread = float(scale(cls)) / (2 * np.log(2))
        tail = np.exp(-0.5 / spread) / (1 + np.exp(-0.5 / spread))
        further = np.exp(-1.5 / spread) / (1 + np.exp(-1.5 / spread))
        found[:, cls] = -np.log2(1 - 2 * tail), -np.log2(max(tail - further, 1e-300)), 1 / (spread * np.log(2))
    return found


@dataclass(frozen=True)
class Tables:
    """What the coders read, by table ``2 * class + quantiser``; table 0 is of class differences.

    Attributes:
        symbols: uint8 ``[tables, 2**12]``, symbol of a quantile.
        bounds: int32 ``[tables, most symbols]``, frequency of a symbol times 2**16, plus those before.
        limits, lows: int64 ``[tables]``.
        weights: int64 ``[classes]``, of a band's magnitudes in the energy of its rows.
        shifts: int64 ``[1024]``, classes that a row's energy moves its bands by, by its ratio to the mean of all rows.
    """

    symbols: np.ndarray
    bounds: np.ndarray
    limits: np.ndarray
    lows: np.ndarray
    weights: np.ndarray
    shifts: np.ndarray


@cache
def tables() -> Tables:
    """All of them; computed once, in a few tenths of a second."""
    counts = [class_frequencies(), class_frequencies()]
    counts += [level_frequencies(cls, quantiser) for cls in range(1, NUM_CLASSES) for quantiser in (0, 1)]
    symbols: np.ndarray = np.empty((len(counts), 1 << PRECISION), np.uint8)
    bounds: np.ndarray = np.zeros((len(counts), max(map(len, counts))), np.int32)
    for number, count in enumerate(counts):
        symbols[number] = np.repeat(np.arange(len(count)), count)
        bounds[number, : len(count)] = count << 16 | (np.cumsum(count) - count)
    classes = range(1, NUM_CLASSES)
    with localcontext(_DECIMAL):
        weights = [0, *(int(256 / (scale(cls) + Decimal("1.2")) + Decimal("0.5")) for cls in classes)]
        thresholds = [Decimal(2) ** (Decimal(2 * shift - 1) / 8) for shift in range(1 - MOST_SHIFT, MOST_SHIFT + 1)]
        middles = [(Decimal(ratio) + Decimal("0.5")) / (1 << RATIO_BITS) for ratio in range(1024)]
        shifts = [sum(middle >= threshold for threshold in thresholds) - MOST_SHIFT for middle in middles]
    return Tables(
        symbols,
        bounds,
        np.array([0, 0, *(limit(cls) for cls in classes for _ in (0, 1))]),
        np.array([0, 0, *(low_bits(cls) for cls in classes for _ in (0, 1))]),
        np.array(weights),
        np.array(shifts),
    )
