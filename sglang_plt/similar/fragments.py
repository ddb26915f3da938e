"""Hashes of n-grams of tokens, and which of them stand for a sequence.

Winnowing (Schleimer, Wilkerson, Aiken: Winnowing, local algorithms for document fingerprinting, SIGMOD 2003) keeps the
smallest hash of every window of consecutive n-grams. Two sequences that share a run of ``gram + window - 1`` tokens
share a whole window, hence its smallest hash, wherever the run stands in either. Of the n-grams of random tokens it
keeps 2 in ``window + 1``.

The hashes are a function of the tokens alone, in integers, so that all ranks and machines have the same. Whoever knows
the function can make collisions; so a collision must cost time only, and tokens are compared before they are believed
equal.
"""

from __future__ import annotations

import numpy as np

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2 ** 64 over the golden ratio; odd, as a base must be to lose no token
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def as_tokens(tokens: np.ndarray) -> np.ndarray:
    """``tokens`` as int64 [n]; a view where they are that already. TypeError for other than integers, ValueError for
    other than one dimension."""
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise TypeError(f"tokens must be integers that int64 holds, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"tokens must have one dimension, got shape {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def gram_hashes(tokens: np.ndarray, gram: int) -> np.ndarray:
    """Hashes of all n-grams of ``tokens`` (int64 [n]): uint64 [max(0, n - gram + 1)], equal where the n-grams are.

    A polynomial modulo 2 ** 64 in the mixed tokens, mixed again so that its order is that of random numbers. Of n-grams
    that differ, a pair not made for it collides with probability 2 ** -64.
    """
    count = len(tokens) - gram + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    # polynomials of 1, 2, 4, ... tokens; those of the binary digits of gram are joined as they come
    part = _mix(tokens.view(np.uint64) + np.uint64(_STEP))
    size, factor, joined = 1, _STEP, 0
    hashes: np.ndarray | None = None
    while True:
        if gram & size:
            digit = part[joined : joined + count]
            hashes = digit if hashes is None else hashes * np.uint64(factor) + digit
            joined += size
        if hashes is not None and joined == gram:
            return _mix(hashes)
        part = part[:-size] * np.uint64(factor) + part[size:]
        size, factor = 2 * size, factor * factor & _ALL


def winnow(hashes: np.ndarray, window: int) -> np.ndarray:
    """The smallest of every ``window`` consecutive hashes: uint64, ascending, each once.

    Fewer hashes than ``window`` count as one window. Which of equal hashes is taken is no question here, as we keep no
    positions.
    """
    if len(hashes) <= window:
        return hashes.min(keepdims=True) if len(hashes) else hashes
    size = 1
    while size < window:
        step = min(size, window - size)
        hashes = np.minimum(hashes[:-step], hashes[step:])
        size += step
    hashes = np.sort(hashes)
    return hashes[np.append(True, hashes[1:] != hashes[:-1])]


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a permutation of 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
