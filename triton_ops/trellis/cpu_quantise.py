"""Trellis-coded quantisation: of two quantisers a component of a row takes the one that the levels before it say.

The quantisers have levels a step apart, those of the second shifted by half a step (and 0), so that a row's levels lie
twice as dense as a level costs bits. Which path of eight states is nearest to the row is a shortest path (Viterbi).
Known from fixed-rate coding (Marcellin and Fischer, 1990), with entropy coding as in JPEG 2000 and VVC.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from triton_ops.trellis.tables import BAND, FIRST_TRELLIS, NEXT

_STATES = len(NEXT)
# of every state, the two that lead to it, and the parity of the level on the way
_BEFORE = np.array([[s for s in range(_STATES) if t in NEXT[s]] for t in range(_STATES)], np.int64)
_PARITY = np.array([[list(NEXT[s]).index(t) for s in row] for t, row in enumerate(_BEFORE)], np.int64)
_TILE = 64
_FAR = np.float32(1e30)


@njit(nogil=True, cache=True, fastmath=False)
def _nearest(a, quantiser, parity):
    """The nearest level of a parity to a magnitude."""
    shift = np.float32(0.5) * np.float32(quantiser)
    low = np.floor(a + shift)
    level = low if (int(low) & 1) == parity else low + np.float32(1)
    middle = level - shift if level > 0 else np.float32(0)
    distance = (a - middle) * (a - middle)
    if quantiser == 1 and level == 2 and a * a < distance:
        return np.float32(0)
    return level


@njit(nogil=True, cache=True)
def _viterbi(components, classes, halves):
    """Fill the trellis-coded bands of ``halves``, which begin in state 0."""
    width, rows = components.shape
    cost: np.ndarray = np.empty((_STATES, _TILE), np.float32)
    after: np.ndarray = np.empty((_STATES, _TILE), np.float32)
    near: np.ndarray = np.empty((4, _TILE), np.float32)
    taken = np.empty((width, _TILE), np.uint8)
    for first in range(0, rows, _TILE):
        count = min(_TILE, rows - first)
        cost[:] = _FAR
        cost[0] = 0
        for component in range(width):
            if classes[component // BAND] < FIRST_TRELLIS:
                continue
            for r in range(count):
                a = abs(components[component, first + r])
                low = np.floor(a)
                odd = (int(low) & 1) == 1
                below, above = a - low, low + np.float32(1) - a
                below, above = below * below, above * above
                near[0, r] = above if odd else below
                near[1, r] = below if odd else above
                low = np.floor(a + np.float32(0.5))
                odd = (int(low) & 1) == 1
                below = a - (low - np.float32(0.5)) if low > 0 else a
                above = low + np.float32(0.5) - a
                below, above = below * below, above * above
                even_level = above if odd else below
                near[2, r] = min(even_level, a * a)
                near[3, r] = below if odd else above
            for r in range(count):
                taken[component, r] = 0
            for state in range(_STATES):
                one, other = _BEFORE[state, 0], _BEFORE[state, 1]
                by_one = 2 * (one & 1) + _PARITY[state, 0]
                by_other = 2 * (other & 1) + _PARITY[state, 1]
                bit = np.uint8(1 << state)
                for r in range(count):
                    first_way = cost[one, r] + near[by_one, r]
                    second_way = cost[other, r] + near[by_other, r]
                    after[state, r] = min(first_way, second_way)
                    taken[component, r] |= bit if second_way < first_way else np.uint8(0)
            cost, after = after, cost
        for r in range(count):
            state = 0
            for other in range(1, _STATES):
                if cost[other, r] < cost[state, r]:
                    state = other
            for component in range(width - 1, -1, -1):
                if classes[component // BAND] < FIRST_TRELLIS:
                    continue
                way = taken[component, r] >> state & 1
                before = _BEFORE[state, way]
                x = components[component, first + r]
                quantiser = before & 1
                level = _nearest(abs(x), quantiser, _PARITY[state, way])
                half = 2 * int(level) - quantiser * (level > 0)
                halves[component, first + r] = half if x > 0 else -half
                state = before


def quantise(components: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Components of one unit in half steps.

    Args:
        components: float32 ``[components, rows]`` in steps, C-contiguous, magnitudes at most ``LARGEST``, components a
            multiple of 16.
        classes: uint8 ``[components / 16]``; where 0, components become 0.

    Returns:
        int16 ``[components, rows]``: even below class ``FIRST_TRELLIS``, rounded to whole steps.
    """
    halves: np.ndarray = 2 * np.rint(components).astype(np.int16)
    halves.reshape(len(classes), -1)[classes == 0] = 0
    _viterbi(components, classes, halves)
    return halves
