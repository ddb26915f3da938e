"""The codes of a block, a symbol at a time in Python integers: what FORMAT.md says, and kernels are held to."""

from __future__ import annotations

import struct

import numpy as np

from triton_ops.trellis.cpu_decode import LANES, START
from triton_ops.trellis.tables import (
    BAND,
    ENERGY_DECAY,
    ENERGY_FLOOR,
    FIRST_TRELLIS,
    NEXT,
    NUM_CLASSES,
    PRECISION,
    RATIO_BITS,
    class_frequencies,
    level_frequencies,
    limit,
    low_bits,
    tables,
)


def half_steps(level: int, quantiser: int) -> int:
    """What a level stands for."""
    return 2 * level - quantiser * ((level > 0) - (level < 0))


class _Lanes:
    """Four states that read the same words."""

    def __init__(self, data: bytes) -> None:
        self.states = list(struct.unpack_from(f"<{LANES}I", data))
        self.words = list(struct.unpack_from(f"<{(len(data) - 4 * LANES) // 2}H", data, 4 * LANES))

    def symbol(self, lane: int, frequencies: np.ndarray) -> int:
        quantile, below = self.states[lane] % 2**PRECISION, 0
        symbol = 0
        while quantile >= below + int(frequencies[symbol]):
            below += int(frequencies[symbol])
            symbol += 1
        self.states[lane] = (self.states[lane] >> PRECISION) * int(frequencies[symbol]) + quantile - below
        self._refill(lane)
        return symbol

    def raw(self, lane: int, bits: int) -> int:
        value = self.states[lane] % 2**bits
        self.states[lane] >>= bits
        self._refill(lane)
        return value

    def _refill(self, lane: int) -> None:
        if self.states[lane] < START:
            self.states[lane] = self.states[lane] << 16 | self.words.pop(0)


def decode(data: bytes, starts: list[bool], rows: int, trellis: bool) -> np.ndarray:
    """The twin of :func:`triton_ops.trellis.cpu_decode.decode`; IndexError or AssertionError where that refuses."""
    lanes = _Lanes(data)
    classes, cls = [], 0
    for _ in starts:
        cls = (cls + lanes.symbol(0, class_frequencies())) % NUM_CLASSES
        classes.append(cls)
    energy, states = [0] * rows, [0] * rows
    out: np.ndarray = np.zeros((BAND * len(classes), rows), np.int16)
    for band, (cls, starting) in enumerate(zip(classes, starts, strict=True)):
        if starting:
            states = [0] * rows
        if cls == 0:
            continue
        coded = trellis and cls >= FIRST_TRELLIS
        mean = sum(energy) // rows + ENERGY_FLOOR
        for first in range(0, rows, LANES):
            group = range(first, min(first + LANES, rows))
            for component in range(band * BAND, band * BAND + BAND):
                for row in group:
                    ratio = min(((energy[row] + ENERGY_FLOOR) << RATIO_BITS) // mean, 1023)
                    own = min(max(cls + int(tables().shifts[ratio]), 1), NUM_CLASSES - 1)
                    quantiser = states[row] % 2 if coded else 0
                    top, low = limit(own), low_bits(own)
                    symbol = lanes.symbol(row - first, level_frequencies(own, quantiser))
                    if symbol > 2 * top:
                        level = lanes.raw(row - first, 16)
                        level -= 2**16 * (level >= 2**15)
                    else:
                        level = ((symbol - top) << low) + (lanes.raw(row - first, low) if low else 0)
                    if coded:
                        states[row] = int(NEXT[states[row], level % 2])
                    out[component, row] = half_steps(level, quantiser)
        magnitudes = np.abs(out[band * BAND : band * BAND + BAND].astype(int)).sum(0)
        for row in range(rows):
            energy[row] += int(tables().weights[cls]) * int(magnitudes[row]) - (energy[row] >> ENERGY_DECAY)
    assert not lanes.words
    assert lanes.states == [START] * LANES
    return out


def quantise(components: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The twin of :func:`triton_ops.trellis.cpu_quantise.quantise`: the path nearest to every row, in float64."""
    halves: np.ndarray = np.zeros(components.shape, np.int16)
    for row in range(components.shape[1]):
        paths: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for component, x in enumerate(components[:, row].astype(float).tolist()):
            cls = int(classes[component // BAND])
            if cls < FIRST_TRELLIS:
                whole = 2 * int(np.rint(x)) if cls else 0
                paths = {state: (cost, [*path, whole]) for state, (cost, path) in paths.items()}
                continue
            longer: dict[int, tuple[float, list[int]]] = {}
            for state, (cost, path) in paths.items():
                for level in {int(abs(x)) + offset for offset in range(-1, 3)} | {0}:
                    if level < 0:
                        continue
                    half = half_steps(level, state % 2)
                    further, then = cost + (abs(x) - half / 2) ** 2, int(NEXT[state, level % 2])
                    if then not in longer or further < longer[then][0]:
                        longer[then] = further, [*path, half if x > 0 else -half]
            paths = longer
        halves[:, row] = min(paths.values())[1]
    return halves
