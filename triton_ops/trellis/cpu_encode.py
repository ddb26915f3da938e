"""Entropy coding on the CPU; the inverse of :mod:`triton_ops.trellis.cpu_decode`, from the last symbol to the first."""

from __future__ import annotations

import numpy as np
from numba import njit

from triton_ops.trellis.cpu_decode import LANES, START, row_classes
from triton_ops.trellis.tables import BAND, ENERGY_DECAY, FIRST_TRELLIS, NEXT, NUM_CLASSES, PRECISION, costs, tables


@njit(nogil=True, cache=True)
def _levels(halves, classes, starts, trellis, weights, shifts, following, levels, chosen):
    """Fill ``levels`` of all codes and the tables ``chosen`` for them, as a decoder comes by them."""
    rows = halves.shape[1]
    energy, states, of_rows = np.zeros(rows, np.int64), np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    for band in range(len(classes)):
        cls = int(classes[band])
        if starts[band]:
            states[:] = 0
        if cls == 0:
            continue
        row_classes(cls, energy, shifts, of_rows)
        coded = trellis and cls >= FIRST_TRELLIS
        for row in range(rows):
            energy[row] -= energy[row] >> ENERGY_DECAY
        for c in range(band * BAND, band * BAND + BAND):
            for row in range(rows):
                half = int(halves[c, row])
                quantiser = states[row] & 1 if coded else 0
                level = (half + quantiser * ((half > 0) - (half < 0))) >> 1
                levels[c, row] = level
                chosen[c, row] = 2 * of_rows[row] + quantiser
                energy[row] += weights[cls] * abs(half)
                if coded:
                    states[row] = following[2 * states[row] + (level & 1)]


@njit(nogil=True, cache=True)
def _push_raw(state, at, words, value, bits):
    if state >= 1 << (32 - bits):
        at -= 1
        words[at] = state & 0xFFFF
        state >>= 16
    return state << bits | value, at


@njit(nogil=True, cache=True)
def _push(state, at, words, symbol, bounds):
    bound = int(bounds[symbol])
    frequency = bound >> 16
    if state >= frequency << (32 - PRECISION):
        at -= 1
        words[at] = state & 0xFFFF
        state >>= 16
    high = state // frequency
    return (high << PRECISION) + state - high * frequency + (bound & 0xFFFF), at


@njit(nogil=True, cache=True)
def _encode(levels, chosen, classes, symbols_of_classes, bounds, limits, lows, lanes, words):
    """Fill ``words`` from the end; returns where they begin."""
    rows, at = levels.shape[1], len(words)
    for band in range(len(classes) - 1, -1, -1):
        if classes[band] == 0:
            continue
        for group in range((rows - 1) // LANES, -1, -1):
            first = group * LANES
            for c in range(band * BAND + BAND - 1, band * BAND - 1, -1):
                for row in range(min(first + LANES, rows) - 1, first - 1, -1):
                    table, level, lane = int(chosen[c, row]), int(levels[c, row]), row - first
                    top, low, state = limits[table], lows[table], lanes[lane]
                    high = level >> low
                    if -top <= high <= top:
                        if low:
                            state, at = _push_raw(state, at, words, level & ((1 << low) - 1), low)
                        symbol = high + top
                    else:
                        state, at = _push_raw(state, at, words, level & 0xFFFF, 16)
                        symbol = 2 * top + 1
                    lanes[lane], at = _push(state, at, words, symbol, bounds[table])
    for band in range(len(classes) - 1, -1, -1):
        lanes[0], at = _push(lanes[0], at, words, symbols_of_classes[band], bounds[0])
    return at


def choose_classes(codes: np.ndarray) -> np.ndarray:
    """The cheapest class of every band, uint8 ``[bands]``.

    Args:
        codes: int16 ``[16 * bands, rows]``, components in whole steps.
    """
    magnitudes = np.abs(codes).reshape(len(codes) // BAND, -1)
    nonzero = np.count_nonzero(magnitudes, axis=1)
    beyond = magnitudes.sum(axis=1, dtype=np.int64) - nonzero
    facts = np.stack((magnitudes.shape[1] - nonzero, nonzero, beyond), axis=1)
    return np.argmin(facts @ costs(), axis=1).astype(np.uint8)


def encode(halves: np.ndarray, classes: np.ndarray, starts: np.ndarray, trellis: bool) -> bytes:
    """Code one block.

    Args:
        halves: int16 ``[16 * bands, rows]``, components in half steps, at least one row; all even without ``trellis``,
            and in bands below class ``FIRST_TRELLIS``; elsewhere what a trellis from state 0 at ``starts`` gives.
        classes: uint8 ``[bands]``, 0 only where all codes are.
        starts: bool ``[bands]``, where units begin.
    """
    t, following = tables(), NEXT.reshape(-1)
    halves = np.ascontiguousarray(halves)
    levels: np.ndarray = np.empty(halves.shape, np.int16)
    chosen: np.ndarray = np.empty(halves.shape, np.uint8)
    _levels(halves, classes, starts, trellis, t.weights, t.shifts, following, levels, chosen)
    steps = np.diff(classes.astype(np.int64), prepend=0) % NUM_CLASSES
    lanes: np.ndarray = np.full(LANES, START, np.int64)
    words: np.ndarray = np.empty(2 * halves.size + len(classes) + 1, np.uint16)  # a symbol and raw bits push one each
    at = _encode(levels, chosen, classes, steps, t.bounds, t.limits, t.lows, lanes, words)
    return lanes.astype("<u4").tobytes() + words[at:].astype("<u2").tobytes()
