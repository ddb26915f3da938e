"""Entropy decoding on the CPU: four interleaved ANS states, a row in four each, so that a core works on all of them."""

from __future__ import annotations

import numpy as np
from numba import njit

from triton_ops.trellis.tables import (
    BAND,
    ENERGY_DECAY,
    ENERGY_FLOOR,
    FIRST_TRELLIS,
    NEXT,
    NUM_CLASSES,
    PRECISION,
    RATIO_BITS,
    tables,
)

LANES = 4
START = 1 << 16
"""State of every lane before its first symbol was coded, and after its last was decoded."""
_MASK = (1 << PRECISION) - 1


@njit(nogil=True, cache=True)
def row_classes(cls, energy, shifts, found):
    """Fill ``found`` with the class of every row in a band of class ``cls``."""
    rows, total = len(energy), 0
    for row in range(rows):
        total += energy[row]
    mean = total // rows + ENERGY_FLOOR
    for row in range(rows):
        ratio = ((energy[row] + ENERGY_FLOOR) << RATIO_BITS) // mean
        found[row] = min(max(cls + shifts[min(ratio, len(shifts) - 1)], 1), NUM_CLASSES - 1)


@njit(nogil=True, cache=True)
def _symbol(state, at, words, symbols, bounds):
    quantile = state & _MASK
    symbol = int(symbols[quantile])
    bound = int(bounds[symbol])
    state = (bound >> 16) * (state >> PRECISION) + quantile - (bound & 0xFFFF)
    if state < START:
        state = state << 16 | int(words[at])
        at += 1
    return state, at, symbol


@njit(nogil=True, cache=True)
def _raw(state, at, words, bits):
    value = state & ((1 << bits) - 1)
    state >>= bits
    if state < START:
        state = state << 16 | int(words[at])
        at += 1
    return state, at, value


@njit(nogil=True, cache=True)
def _level(state, at, words, symbols, bounds, limit, low):
    """``(state, at, level)`` behind the next level of a lane."""
    state, at, symbol = _symbol(state, at, words, symbols, bounds)
    if symbol > 2 * limit:
        state, at, value = _raw(state, at, words, 16)
        return state, at, value - ((value & 0x8000) << 1)
    level = symbol - limit
    if low:
        state, at, value = _raw(state, at, words, low)
        level = level << low | value
    return state, at, level


@njit(nogil=True, cache=True)
def _decode(words, num_words, lanes, starts, trellis, symbols, bounds, limits, lows, weights, shifts, following, out):
    """Returns True when the words are used up; ``words`` has room to read on behind them."""
    rows, bands = out.shape[1], len(starts)
    classes: np.ndarray = np.zeros(bands, np.int64)
    at, before = 0, 0
    for band in range(bands):
        lanes[0], at, step = _symbol(lanes[0], at, words, symbols[0], bounds[0])
        if at > num_words:
            return False
        before = (before + step) % NUM_CLASSES
        classes[band] = before
    energy, states = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    of_rows = np.zeros(rows, np.int64)
    x0, x1, x2, x3 = lanes[0], lanes[1], lanes[2], lanes[3]
    whole = rows - rows % LANES
    for band in range(bands):
        cls = classes[band]
        if starts[band]:
            states[:] = 0
        if cls == 0:
            continue
        row_classes(cls, energy, shifts, of_rows)
        coded = trellis and cls >= FIRST_TRELLIS
        weight, base = weights[cls], band * BAND
        for row in range(0, whole, LANES):
            t0, t1, t2, t3 = 2 * of_rows[row], 2 * of_rows[row + 1], 2 * of_rows[row + 2], 2 * of_rows[row + 3]
            m0, m1, m2, m3 = limits[t0], limits[t1], limits[t2], limits[t3]
            n0, n1, n2, n3 = lows[t0], lows[t1], lows[t2], lows[t3]
            e0, e1, e2, e3 = 0, 0, 0, 0
            if coded:
                s0, s1, s2, s3 = states[row], states[row + 1], states[row + 2], states[row + 3]
                for c in range(base, base + BAND):
                    q0, q1, q2, q3 = s0 & 1, s1 & 1, s2 & 1, s3 & 1
                    x0, at, k0 = _level(x0, at, words, symbols[t0 + q0], bounds[t0 + q0], m0, n0)
                    x1, at, k1 = _level(x1, at, words, symbols[t1 + q1], bounds[t1 + q1], m1, n1)
                    x2, at, k2 = _level(x2, at, words, symbols[t2 + q2], bounds[t2 + q2], m2, n2)
                    x3, at, k3 = _level(x3, at, words, symbols[t3 + q3], bounds[t3 + q3], m3, n3)
                    s0, s1 = following[2 * s0 + (k0 & 1)], following[2 * s1 + (k1 & 1)]
                    s2, s3 = following[2 * s2 + (k2 & 1)], following[2 * s3 + (k3 & 1)]
                    k0 = 2 * k0 - q0 * ((k0 > 0) - (k0 < 0))
                    k1 = 2 * k1 - q1 * ((k1 > 0) - (k1 < 0))
                    k2 = 2 * k2 - q2 * ((k2 > 0) - (k2 < 0))
                    k3 = 2 * k3 - q3 * ((k3 > 0) - (k3 < 0))
                    out[c, row], out[c, row + 1], out[c, row + 2], out[c, row + 3] = k0, k1, k2, k3
                    e0, e1, e2, e3 = e0 + abs(k0), e1 + abs(k1), e2 + abs(k2), e3 + abs(k3)
                states[row], states[row + 1], states[row + 2], states[row + 3] = s0, s1, s2, s3
            else:
                for c in range(base, base + BAND):
                    x0, at, k0 = _level(x0, at, words, symbols[t0], bounds[t0], m0, n0)
                    x1, at, k1 = _level(x1, at, words, symbols[t1], bounds[t1], m1, n1)
                    x2, at, k2 = _level(x2, at, words, symbols[t2], bounds[t2], m2, n2)
                    x3, at, k3 = _level(x3, at, words, symbols[t3], bounds[t3], m3, n3)
                    k0, k1, k2, k3 = 2 * k0, 2 * k1, 2 * k2, 2 * k3
                    out[c, row], out[c, row + 1], out[c, row + 2], out[c, row + 3] = k0, k1, k2, k3
                    e0, e1, e2, e3 = e0 + abs(k0), e1 + abs(k1), e2 + abs(k2), e3 + abs(k3)
            if at > num_words:
                return False
            energy[row] += weight * e0 - (energy[row] >> ENERGY_DECAY)
            energy[row + 1] += weight * e1 - (energy[row + 1] >> ENERGY_DECAY)
            energy[row + 2] += weight * e2 - (energy[row + 2] >> ENERGY_DECAY)
            energy[row + 3] += weight * e3 - (energy[row + 3] >> ENERGY_DECAY)
        if whole < rows:
            lanes[0], lanes[1], lanes[2], lanes[3] = x0, x1, x2, x3
            for c in range(base, base + BAND):
                for row in range(whole, rows):
                    state, q = states[row], (states[row] & 1) if coded else 0
                    t = 2 * of_rows[row]
                    lane = row - whole
                    lanes[lane], at, k = _level(
                        lanes[lane], at, words, symbols[t + q], bounds[t + q], limits[t], lows[t]
                    )
                    if coded:
                        states[row] = following[2 * state + (k & 1)]
                    out[c, row] = 2 * k - q * ((k > 0) - (k < 0))
            if at > num_words:
                return False
            for row in range(whole, rows):
                total = 0
                for c in range(base, base + BAND):
                    total += abs(int(out[c, row]))
                energy[row] += weight * total - (energy[row] >> ENERGY_DECAY)
            x0, x1, x2, x3 = lanes[0], lanes[1], lanes[2], lanes[3]
    lanes[0], lanes[1], lanes[2], lanes[3] = x0, x1, x2, x3
    return at == num_words


def decode(data: bytes | memoryview, starts: np.ndarray, rows: int, trellis: bool) -> np.ndarray:
    """The codes of a block in half steps, int16 ``[16 * bands, rows]``.

    Args:
        starts: bool ``[bands]``, where units begin.
        trellis: as when they were coded.

    Raises:
        ValueError: ``data`` does not hold that.
    """
    head = 4 * LANES
    if len(data) < head or (len(data) - head) % 2:
        raise ValueError(f"entropy: {len(data)} bytes are no {LANES} states and words behind them")
    lanes = np.frombuffer(data, "<u4", LANES).astype(np.int64)
    num_words = (len(data) - head) // 2
    words: np.ndarray = np.zeros(num_words + 3 * LANES * BAND + 2, np.uint16)
    words[:num_words] = np.frombuffer(data, "<u2", num_words, head)
    out: np.ndarray = np.zeros((BAND * len(starts), rows), np.int16)
    if (lanes < START).any():
        raise ValueError(f"entropy: states {lanes.tolist()}, the least is {START}")
    t, following = tables(), NEXT.reshape(-1)
    used_up = _decode(
        words, num_words, lanes, starts, trellis, t.symbols, t.bounds, t.limits, t.lows, t.weights, t.shifts, following,
        out,
    )  # fmt: skip
    if not used_up or (lanes != START).any():
        raise ValueError(f"entropy: {num_words} words are not the codes of {len(starts)} bands and {rows} rows")
    return out
