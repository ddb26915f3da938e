"""Entropy coding of quantised components: static Laplace models, one class a band of components and block.

The models are integers that every machine computes alike (:func:`frequencies`), the coder is ``constriction``'s ANS
stack. A band is 16 neighbouring components of one layer over the rows of a block; its class is the one that codes the
band in the fewest bits, so scales follow the text. Bands whose codes are mostly zero are coded as gaps between the
codes that are not, which makes decoding several times faster. FORMAT.md is normative for the bytes.
"""

from __future__ import annotations

import struct
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

import constriction
import numpy as np

BAND = 16
"""Components that share a class."""
PRECISION = 24
"""Probabilities are multiples of 2**-24."""
NUM_CLASSES = 52
"""Class 0 is all zeros; class c has a Laplace scale of ``2**((c - 1) / 4 - 4)`` steps, 0.06 to 362."""
NUM_SPARSE = 11
"""Classes below this one are coded by gaps; a code of class 10 is zero with a probability of 0.83."""

_LAST_GAP = 255  # of the alphabet of gaps: as many zeros, and go on counting
_MAX_VALUE = 511
_DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN, Emin=-999999, Emax=999999, clamp=0, flags=[], traps=[])
_WORD: np.dtype = np.dtype("<u4")
_HEADER = struct.Struct(f"<{2 + NUM_SPARSE}I")  # ANS words, escapes, nonzero codes of every sparse class


def scale(cls: int) -> Decimal:
    """Laplace scale of a class above 0, in steps."""
    return Decimal(2) ** (Decimal(cls - 1) / 4 - 4)


@cache
def limit(cls: int) -> int:
    """Codes of a class reach from ``-limit`` to ``limit``; what lies outside is an escape."""
    with localcontext(_DECIMAL):
        return min(_MAX_VALUE, int(12 * scale(cls)) + 2)


def frequencies(weights: list[Decimal]) -> np.ndarray:
    """Integers above 0 that sum to 2**24, proportional to ``weights`` up to rounding; the largest absorbs the rest."""
    total = sum(weights)
    counts = [max(1, int(weight / total * (1 << PRECISION))) for weight in weights]
    counts[counts.index(max(counts))] += (1 << PRECISION) - sum(counts)
    return np.array(counts, np.int64)


def _laplace(cls: int) -> tuple[Decimal, list[Decimal], Decimal]:
    """Probabilities of a rounded Laplace variable: of 0, of 1, 2, ... ``limit``, and of what lies outside."""
    half = (-1 / (2 * scale(cls))).exp()
    tail, tails = half, []
    for _ in range(limit(cls)):
        tails.append(tail / 2 * (1 - half * half))
        tail *= half * half
    return 1 - half, tails, tail


@cache
def value_frequencies(cls: int) -> np.ndarray:
    """Of the codes ``-limit .. limit`` of a class, then of an escape; a sparse class has no zero."""
    with localcontext(_DECIMAL):
        zero, tails, outside = _laplace(cls)
        middle = [] if cls < NUM_SPARSE else [zero]
        return frequencies([*reversed(tails), *middle, *tails, outside])


@cache
def gap_frequencies(cls: int) -> np.ndarray:
    """Of 0 .. 254 zeros in front of a code that is not zero, then of 255 zeros and more to come."""
    with localcontext(_DECIMAL):
        zero = _laplace(cls)[0]
        return frequencies([*((1 - zero) * zero**gap for gap in range(_LAST_GAP)), zero**_LAST_GAP])


@cache
def _model(kind: str, cls: int) -> constriction.stream.model.Categorical:
    counts = value_frequencies(cls) if kind == "value" else gap_frequencies(cls)
    # a count over a power of two is exact in float32; what constriction makes of it is in FORMAT.md
    return constriction.stream.model.Categorical((counts / (1 << PRECISION)).astype(np.float32), perfect=False)


@cache
def _costs() -> np.ndarray:
    """``[3, classes]`` bits: of a zero, of a code that is not, and of every unit of its magnitude beyond the first."""
    found = np.zeros((3, NUM_CLASSES))
    found[:, 0] = 0, 1e9, 1e9
    with localcontext(_DECIMAL):
        for cls in range(1, NUM_CLASSES):
            zero, tails, _ = _laplace(cls)
            found[0, cls] = -np.log2(float(zero))
            found[1, cls] = -np.log2(float(tails[0]))
            found[2, cls] = np.log2(float(tails[0] / tails[1]))
    return found


def warm_up() -> None:
    """Compute the tables of every class, which the first block would wait for otherwise."""
    _costs()
    _class_model()
    for cls in range(1, NUM_CLASSES):
        _model("value", cls)
        if cls < NUM_SPARSE:
            _model("gap", cls)


def choose_classes(codes: np.ndarray) -> np.ndarray:
    """The cheapest class of every band.

    Args:
        codes: int16 ``[components, rows]``, components a multiple of 16.
    """
    magnitudes = np.abs(codes).reshape(len(codes) // BAND, -1)
    nonzero = np.count_nonzero(magnitudes, axis=1)
    beyond = magnitudes.sum(axis=1, dtype=np.int64) - nonzero
    facts = np.stack((magnitudes.shape[1] - nonzero, nonzero, beyond), axis=1)
    return np.argmin(facts @ _costs(), axis=1).astype(np.uint8)


class _Escapes:
    """Codes beyond the limit of their class, in coding order."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.values = [] if values is None else [values]
        self._next = 0

    def symbols(self, codes: np.ndarray, cls: int) -> np.ndarray:
        """Codes as the alphabet of :func:`value_frequencies` counts them."""
        top = limit(cls)
        symbols: np.ndarray = codes.astype(np.int32) + top
        if cls < NUM_SPARSE:
            symbols -= codes > 0
        outside = (codes > top) | (codes < -top)
        if outside.any():
            self.values.append(codes[outside].astype(np.int16))
            symbols[outside] = len(value_frequencies(cls)) - 1
        return symbols

    def codes(self, symbols: np.ndarray, cls: int) -> np.ndarray:
        """Inverse of :meth:`symbols`."""
        top = limit(cls)
        codes: np.ndarray = symbols - top
        if cls < NUM_SPARSE:
            codes += symbols >= top
        outside = symbols == len(value_frequencies(cls)) - 1
        count = int(np.count_nonzero(outside))
        if count:
            if count > self.left:
                raise ValueError(f"entropy: {count} escapes are coded, {self.left} are left")
            codes[outside] = self.values[0][self._next : self._next + count]
            self._next += count
        return codes

    @property
    def left(self) -> int:
        """Escapes that :meth:`codes` has not used."""
        return sum(len(values) for values in self.values) - self._next


def encode(codes: np.ndarray) -> bytes:
    """Code one block.

    Args:
        codes: int16 ``[components, rows]``, components a multiple of 16, at least one row.
    """
    classes = choose_classes(codes)
    bands = codes.reshape(len(classes), -1)
    escapes = _Escapes()
    segments: list[tuple[np.ndarray, constriction.stream.model.Categorical]] = [
        (_class_symbols(classes), _class_model())
    ]
    nonzero = [0] * NUM_SPARSE
    for cls in range(1, NUM_CLASSES):
        chosen = classes == cls
        if not chosen.any():
            continue
        flat = bands[chosen].reshape(-1)
        if cls < NUM_SPARSE:
            where = np.flatnonzero(flat)
            nonzero[cls] = len(where)
            flat = flat[where]
            segments.append((_gap_symbols(where), _model("gap", cls)))
        segments.append((escapes.symbols(flat, cls), _model("value", cls)))
    coder = constriction.stream.stack.AnsCoder()
    for symbols, model in reversed(segments):
        coder.encode_reverse(symbols, model)
    words = coder.get_compressed().astype(_WORD)
    outside = np.concatenate(escapes.values).astype("<i2") if escapes.values else np.empty(0, "<i2")
    return _HEADER.pack(len(words), len(outside), *nonzero) + words.tobytes() + outside.tobytes()


def decode(data: bytes | memoryview, components: int, rows: int) -> np.ndarray:
    """The codes of one block, int16 ``[components, rows]``.

    Raises:
        ValueError: ``data`` is not what :func:`encode` makes of so many codes.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"entropy: {len(data)} bytes, the header alone has {_HEADER.size}")
    num_words, num_escapes, *nonzero = _HEADER.unpack_from(data)
    if len(data) != _HEADER.size + 4 * num_words + 2 * num_escapes:
        raise ValueError(f"entropy: {len(data)} bytes do not hold {num_words} words and {num_escapes} escapes")
    words = np.frombuffer(data, _WORD, num_words, _HEADER.size)
    escapes = _Escapes(np.frombuffer(data, "<i2", num_escapes, _HEADER.size + 4 * num_words))
    coder = constriction.stream.stack.AnsCoder(words.astype(np.uint32))
    classes = _classes(coder.decode(_class_model(), components // BAND))
    bands: np.ndarray = np.zeros((len(classes), BAND * rows), np.int16)
    for cls in range(1, NUM_CLASSES):
        chosen = np.flatnonzero(classes == cls)
        if not len(chosen):
            continue
        if cls < NUM_SPARSE:
            where = _decode_gaps(coder, cls, nonzero[cls], len(chosen) * BAND * rows)
            values = escapes.codes(coder.decode(_model("value", cls), nonzero[cls]), cls)
            bands[chosen[where // (BAND * rows)], where % (BAND * rows)] = values
        else:
            symbols = coder.decode(_model("value", cls), len(chosen) * BAND * rows)
            bands[chosen] = escapes.codes(symbols, cls).reshape(len(chosen), -1)
    if escapes.left or not coder.is_empty():
        raise ValueError(f"entropy: {escapes.left} escapes and {coder.num_words()} words are left over")
    return bands.reshape(components, rows)


@cache
def _class_model() -> constriction.stream.model.Categorical:
    """Of the difference to the class of the band before, modulo the number of classes; small ones are likely."""
    with localcontext(_DECIMAL):
        distances = [min(step, NUM_CLASSES - step) for step in range(NUM_CLASSES)]
        counts = frequencies([Decimal(2) ** -distance for distance in distances])
    return constriction.stream.model.Categorical((counts / (1 << PRECISION)).astype(np.float32), perfect=False)


def _class_symbols(classes: np.ndarray) -> np.ndarray:
    return (np.diff(classes.astype(np.int32), prepend=0) % NUM_CLASSES).astype(np.int32)


def _classes(symbols: np.ndarray) -> np.ndarray:
    return np.cumsum(symbols) % NUM_CLASSES


def _gap_symbols(where: np.ndarray) -> np.ndarray:
    gaps = np.diff(where, prepend=-1) - 1
    more, last = np.divmod(gaps, _LAST_GAP)
    symbols: np.ndarray = np.full(len(gaps) + int(more.sum()), _LAST_GAP, np.int32)
    symbols[np.cumsum(more + 1) - 1] = last
    return symbols


def _decode_gaps(coder: constriction.stream.stack.AnsCoder, cls: int, count: int, size: int) -> np.ndarray:
    """Positions below ``size`` of ``count`` codes: symbols are read until so many gaps have ended."""
    model = _model("gap", cls)
    parts: list[np.ndarray] = []
    missing, end = count, 0
    while missing and count <= size:
        symbols = coder.decode(model, missing)
        parts.append(symbols)
        ended = int(np.count_nonzero(symbols != _LAST_GAP))
        missing -= ended
        end += int(symbols.sum(dtype=np.int64)) + ended
        if end > size:  # damaged: without this check the loop could go on for as long as the data does
            break
    if missing or end > size:
        raise ValueError(f"entropy: {count} codes do not fit the {size} of class {cls}")
    if not parts:
        return np.empty(0, np.int64)
    symbols = np.concatenate(parts)
    ends = symbols != _LAST_GAP
    return (np.cumsum(symbols, dtype=np.int64))[ends] + np.arange(count)
