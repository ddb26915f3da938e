"""The entropy coder: pinned tables and bytes, a slow twin in Python integers, rates, and damage that is refused."""

import math
import struct
from contextlib import suppress
from decimal import localcontext

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.codec import entropy
from sglang_plt.codec.entropy import BAND, NUM_CLASSES, NUM_SPARSE, decode, encode

HEADER_BYTES = 4 * (2 + NUM_SPARSE)


def laplace(seed: int, scales: list[float], rows: int) -> np.ndarray:
    """Rounded codes, one band of 16 components a scale."""
    wide = np.repeat(scales, BAND)[:, None]
    return np.random.default_rng(seed).laplace(0, wide, (len(wide), rows)).round().clip(-32767, 32767).astype(np.int16)


class Stack:
    """The decoder of FORMAT.md in Python integers."""

    def __init__(self, words: list[int]) -> None:
        self.words, self.state = list(words), 0
        self._refill()

    def pop(self, counts: np.ndarray) -> int:
        size, below, left = len(counts), 0, []
        for symbol, count in enumerate(counts.tolist()):
            left.append(int(np.float32(np.float32(below / 2**24) * np.float32(2**24 - size))) + symbol)
            below += count
        left.append(2**24)
        quantile = self.state % 2**24
        symbol = max(i for i in range(size) if left[i] <= quantile)
        self.state = self.state // 2**24 * (left[symbol + 1] - left[symbol]) + quantile - left[symbol]
        self._refill()
        return symbol

    def _refill(self) -> None:
        while self.words and self.state < 2**32:
            self.state = self.state << 32 | self.words.pop()


def decode_slowly(data: bytes, components: int, rows: int) -> np.ndarray:
    """The twin of :func:`decode`, a symbol at a time, as FORMAT.md says it."""
    num_words, num_escapes, *nonzero = struct.unpack_from("<13I", data)
    stack = Stack(list(struct.unpack_from(f"<{num_words}I", data, HEADER_BYTES)))
    escapes = list(struct.unpack_from(f"<{num_escapes}h", data, HEADER_BYTES + 4 * num_words))
    distances = [min(step, NUM_CLASSES - step) for step in range(NUM_CLASSES)]
    class_counts = entropy.frequencies([entropy.Decimal(2) ** -distance for distance in distances])
    classes, before = [], 0
    for _ in range(components // BAND):
        before = (before + stack.pop(class_counts)) % NUM_CLASSES
        classes.append(before)
    bands = np.zeros((len(classes), BAND * rows), np.int16)
    for cls in range(1, NUM_CLASSES):
        places = [(band, at) for band, own in enumerate(classes) if own == cls for at in range(BAND * rows)]
        top, sparse = entropy.limit(cls), cls < NUM_SPARSE
        if sparse:
            found, at = [], -1
            while places and len(found) < nonzero[cls]:
                gap = stack.pop(entropy.gap_frequencies(cls))
                at += gap
                if gap < 255:
                    at += 1
                    found.append(places[at])
            places = found
        values = [*range(-top, 0), *range(sparse, top + 1)]
        for place in places:
            symbol = stack.pop(entropy.value_frequencies(cls))
            bands[place] = values[symbol] if symbol < len(values) else escapes.pop(0)
    assert not escapes
    assert (stack.state, stack.words) == (0, [])
    return bands.reshape(components, rows)


def test_tables_are_pinned_and_alike_whatever_the_precision():
    digest = xxhash.xxh3_64()
    for cls in range(1, NUM_CLASSES):
        tables = [entropy.value_frequencies(cls)]
        tables += [entropy.gap_frequencies(cls)] if cls < NUM_SPARSE else []
        for table in tables:
            assert table.sum() == 2**24
            assert table.min() >= 1
            digest.update(table.astype("<i8").tobytes())
    assert digest.hexdigest() == "dbae630aa0438dfa"
    assert entropy.value_frequencies(1).tolist() == [1, 8388606, 8388607, 1, 1]
    with localcontext() as context:  # whatever the program around us has set
        context.prec = 5
        for table in (entropy.value_frequencies, entropy.gap_frequencies, entropy.limit):
            again = table.__wrapped__(9)
            assert np.array_equal(again, table(9))


@pytest.mark.parametrize("digits", [28, 90])
def test_tables_do_not_hang_on_a_digit(digits, monkeypatch):
    context = entropy._DECIMAL.copy()
    context.prec = digits
    monkeypatch.setattr(entropy, "_DECIMAL", context)
    for cls in (1, 7, 10, 11, 30, 51):
        assert np.array_equal(entropy.value_frequencies.__wrapped__(cls), entropy.value_frequencies(cls))
    for cls in (1, 10):
        assert np.array_equal(entropy.gap_frequencies.__wrapped__(cls), entropy.gap_frequencies(cls))


def test_bytes_are_pinned():
    codes = np.zeros((3 * BAND, 2), np.int16)
    codes[:BAND] = np.arange(-16, 16).reshape(BAND, 2)
    codes[40, 1], codes[47, 0] = -2, 700
    data = encode(codes)
    assert data.hex() == (
        "0e00000001000000" + 11 * "00000000" +  # words, escapes, codes of the sparse classes
        "1b9b7d49eb5f81daf0697d544f2b7e122cd37e40c3fce9e54bf6d2c42f678e37858e3dee6f4120a3d3fa1184f5aaaac7b0aaaa525555411a"
        "bc02"
    )  # fmt: skip
    assert np.array_equal(decode_slowly(data, *codes.shape), codes)
    assert np.array_equal(decode(data, *codes.shape), codes)


CODES = st.one_of(st.integers(-2, 2), st.integers(-40, 40), st.integers(-32767, 32767))


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1), st.lists(CODES, max_size=20))
def test_round_trip(bands, rows, seed, values):
    rng = np.random.default_rng(seed)
    codes = laplace(seed, list(2.0 ** rng.integers(-6, 11, bands)), rows)
    codes.reshape(-1)[rng.integers(0, codes.size, len(values))] = values
    data = encode(codes)
    assert np.array_equal(decode(data, *codes.shape), codes)
    assert np.array_equal(decode(memoryview(data), *codes.shape), codes)


@pytest.mark.parametrize(
    "codes",
    [
        np.zeros((64, 256), np.int16),
        np.zeros((16, 1), np.int16),
        np.full((32, 3), -32767, np.int16),
        np.eye(16, 256, dtype=np.int16) * 32767,
        laplace(3, [0.1, 0.4, 3.0, 80.0, 300.0], 3),
        np.asfortranarray(laplace(4, [0.2, 5.0], 7)),
    ],
    ids=["zeros", "one row", "escapes", "sparse escapes", "every kind", "fortran order"],
)
def test_edges_decode_alike_in_the_slow_twin(codes):
    data = encode(codes)
    assert np.array_equal(decode(data, *codes.shape), codes)
    if codes.size < 2000:
        assert np.array_equal(decode_slowly(data, *codes.shape), codes)


def test_long_runs_of_zeros():
    codes = np.zeros((16, 256), np.int16)
    codes.reshape(-1)[[0, 254, 255, 511, 512 + 255, 4095]] = [1, -1, 2, 1, 1, -1]  # gaps of 253, 0, 255, 255, 3327
    assert np.array_equal(decode(encode(codes), 16, 256), codes)


def test_zeros_take_a_header_and_next_to_nothing():
    assert len(encode(np.zeros((384 * 16, 256), np.int16))) <= HEADER_BYTES + 16 * 384 // 64 + 8


@pytest.mark.parametrize("scale", [0.15, 0.3, 0.5, 1.0, 3.3, 25.0, 120.0])
def test_size_is_close_to_the_entropy(scale):
    codes = laplace(0, [scale] * 60, 256)
    half = math.exp(-1 / (2 * scale))
    magnitude = np.abs(codes.astype(np.float64))
    tail = np.log2((1 - half * half) / (2 * half)) - magnitude / scale * math.log2(math.e)
    ideal = -np.where(magnitude == 0, math.log2(1 - half), tail).sum()
    assert len(encode(codes)) * 8 <= 1.03 * ideal + 8 * HEADER_BYTES


def test_scales_follow_the_bands():
    mixed = laplace(0, [0.2, 50.0] * 20, 256)
    apart = len(encode(laplace(0, [0.2] * 20, 256))) + len(encode(laplace(0, [50.0] * 20, 256)))
    assert len(encode(mixed)) <= 1.005 * apart


DATA = encode(laplace(7, [0.1, 0.5, 2.0, 30.0, 400.0], 40))
SHAPE = (80, 40)


@pytest.mark.parametrize("length", [0, 3, HEADER_BYTES - 1, HEADER_BYTES, len(DATA) // 2, len(DATA) - 1])
def test_truncated_data_is_refused(length):
    with pytest.raises(ValueError, match="entropy"):
        decode(DATA[:length], *SHAPE)
    with pytest.raises(ValueError, match="entropy"):
        decode(DATA + b"\0", *SHAPE)


@given(st.integers(0, 2 + NUM_SPARSE - 1), st.integers(0, 2**32 - 1))
def test_counts_that_disagree_are_refused(field, value):
    header = list(struct.unpack_from("<13I", DATA))
    if header[field] == value:
        return
    header[field] = value
    damaged = struct.pack("<13I", *header) + DATA[HEADER_BYTES:]
    try:
        decode(damaged, *SHAPE)
    except ValueError:
        return
    assert field >= 2  # the count of a class that no band has is not read


@given(st.integers(HEADER_BYTES, len(DATA) - 1), st.integers(1, 255))
def test_damage_ends_in_codes_or_an_error(at, value):
    damaged = bytearray(DATA)
    damaged[at] ^= value
    with suppress(ValueError):
        assert decode(bytes(damaged), *SHAPE).shape == SHAPE


@given(st.binary(max_size=400), st.integers(0, 100), st.lists(st.integers(0, 4000), min_size=11, max_size=11))
def test_garbage_ends(tail, words, nonzero):
    data = struct.pack("<13I", min(words, len(tail) // 4), max(0, len(tail) // 2 - 2 * words), *nonzero) + tail
    with suppress(ValueError):
        assert decode(data, *SHAPE).shape == SHAPE


def test_other_shapes_are_refused_or_differ():
    for shape in ((80, 39), (80, 41), (64, 40), (96, 40)):
        with pytest.raises(ValueError, match="entropy"):
            decode(DATA, *shape)
