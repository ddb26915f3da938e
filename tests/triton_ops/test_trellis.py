"""Trellis-coded components: pinned tables and bytes, slow twins in Python integers, rates, damage that is refused."""

import itertools
import math
import struct
from contextlib import suppress
from decimal import localcontext

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.codec.entropy import decode_numbers, encode_numbers
from triton_ops.trellis import reference, tables
from triton_ops.trellis.cpu_decode import LANES, START, decode
from triton_ops.trellis.cpu_encode import choose_classes, encode
from triton_ops.trellis.cpu_quantise import quantise
from triton_ops.trellis.tables import BAND, FIRST_TRELLIS, LARGEST, NUM_CLASSES, PRECISION

HEADER_BYTES = 4 * LANES


def logistic(seed: int, scales: list[float], rows: int) -> np.ndarray:
    """Components in steps, float32, one band of 16 a mean magnitude."""
    wide = np.repeat(scales, BAND)[:, None] / (2 * math.log(2))
    drawn = np.random.default_rng(seed).logistic(0, wide, (len(wide), rows))
    return drawn.clip(-LARGEST, LARGEST).astype(np.float32)


def whole(components: np.ndarray) -> np.ndarray:
    return np.rint(components).astype(np.int16)


def coded(components: np.ndarray, starts: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Bytes and half steps of units that begin at ``starts``."""
    classes = choose_classes(whole(components))
    edges = [*np.flatnonzero(starts).tolist(), len(starts)]
    parts = [
        quantise(np.ascontiguousarray(components[BAND * first : BAND * last]), classes[first:last])
        for first, last in itertools.pairwise(edges)
    ]
    halves = np.concatenate(parts)
    return encode(halves, classes, starts, trellis=True), halves


def one_start(bands: int, *more: int) -> np.ndarray:
    starts = np.zeros(bands, np.bool_)
    starts[[0, *more]] = True
    return starts


# -- tables -----------------------------------------------------------------------------------------------------------


def all_tables() -> list[np.ndarray]:
    found = [tables.class_frequencies.__wrapped__()]
    return found + [tables.level_frequencies.__wrapped__(cls, q) for cls in range(1, NUM_CLASSES) for q in (0, 1)]


def test_tables_are_pinned():
    digest = xxhash.xxh3_64()
    for table in all_tables():
        assert (table.sum(), table.min() >= 1, len(table) <= 128) == (1 << PRECISION, True, True)
        digest.update(table.astype("<i8").tobytes())
    found = tables.tables()
    for part in (found.weights, found.shifts, found.limits, found.lows):
        digest.update(part.astype("<i8").tobytes())
    assert digest.hexdigest() == "134428dede3e370a"


@pytest.mark.parametrize("digits", [28, 90])
def test_tables_do_not_hang_on_a_digit(digits, monkeypatch):
    want = all_tables()
    context = tables._DECIMAL.copy()
    context.prec = digits
    monkeypatch.setattr(tables, "_DECIMAL", context)
    with localcontext() as around:  # whatever the program around us has set
        around.prec = 5
        assert all(np.array_equal(one, other) for one, other in zip(all_tables(), want, strict=True))


def test_a_trellis_reaches_every_state_in_two_ways_and_stays_in_0_on_zeros():
    assert sorted(tables.NEXT.reshape(-1).tolist()) == sorted(2 * list(range(8)))
    assert tables.NEXT[0, 0] == 0


# -- quantising -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.sampled_from([1, 2, 5]))
def test_quantising_finds_a_nearest_path(seed, bands, rows):
    rng = np.random.default_rng(seed)
    components = logistic(seed, list(2.0 ** rng.integers(-5, 8, bands)), rows)
    components.reshape(-1)[rng.integers(0, components.size, 3)] = [0, 0.5, 1.5]
    classes = choose_classes(whole(components))
    fast, slow = quantise(components, classes), reference.quantise(components, classes)
    errors = [((halves / 2 - components.astype(float)) ** 2).sum(0) for halves in (fast, slow)]
    assert np.allclose(*errors, rtol=1e-4, atol=1e-3)
    still = np.repeat(classes < FIRST_TRELLIS, BAND)
    assert np.array_equal(fast[still], slow[still])


def test_more_rows_than_a_tile_are_quantised_row_by_row():
    components = logistic(1, [0.4, 3.0, 20.0], 150)
    classes = choose_classes(whole(components))
    together = quantise(components, classes)
    for row in (0, 63, 64, 149):
        assert np.array_equal(quantise(components[:, row : row + 1].copy(), classes), together[:, row : row + 1])


def test_what_was_quantised_stays_as_it_is():
    components = logistic(2, [0.2, 0.5, 1.0, 8.0, 60.0], 256)
    classes = choose_classes(whole(components))
    halves = quantise(components, classes)
    assert np.array_equal(quantise((halves / 2).astype(np.float32), classes), halves)


@pytest.mark.parametrize(("scale", "step", "fewer"), [(1.0, 1.24, 0.07), (4.0, 1.13, 0.12), (30.0, 1.13, 0.12)])
def test_a_trellis_takes_fewer_bits_than_rounding_of_no_larger_error(scale, step, fewer):
    components, starts = logistic(3, [scale] * 40, 256), one_start(40)
    rounded = whole(components)
    data, halves = coded(components / np.float32(step), starts)
    assert ((halves / 2 * step - components) ** 2).mean() < ((rounded - components) ** 2).mean()
    assert 8 * len(data) < 8 * len(encode_numbers(rounded)) - fewer * components.size


# -- coding -----------------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.floats(-2, 2), st.floats(-40, 40), st.floats(-LARGEST, LARGEST))


@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32 - 1), st.lists(VALUES, max_size=20), st.integers(0, 4)
)
def test_round_trip_and_the_slow_twin(bands, rows, seed, values, second):
    rng = np.random.default_rng(seed)
    components = logistic(seed, list(2.0 ** rng.integers(-6, 11, bands)), rows)
    components.reshape(-1)[rng.integers(0, components.size, len(values))] = values
    starts = one_start(bands, min(second, bands - 1))
    data, halves = coded(components, starts)
    assert np.array_equal(decode(data, starts, rows, trellis=True), halves)
    assert np.array_equal(decode(memoryview(data), starts, rows, trellis=True), halves)
    assert np.array_equal(reference.decode(data, starts.tolist(), rows, trellis=True), halves)


@given(st.integers(1, 5), st.sampled_from([1, 3, 4, 7, 256]), st.integers(0, 2**32 - 1))
def test_whole_numbers_round_trip(bands, rows, seed):
    rng = np.random.default_rng(seed)
    codes = whole(logistic(seed, list(2.0 ** rng.integers(-6, 13, bands)), rows))
    data = encode_numbers(codes)
    assert np.array_equal(decode_numbers(data, *codes.shape), codes)
    if codes.size < 1000:
        assert np.array_equal(reference.decode(data, one_start(bands).tolist(), rows, trellis=False), 2 * codes)


@pytest.mark.parametrize(
    "codes",
    [
        np.zeros((64, 256), np.int16),
        np.zeros((16, 1), np.int16),
        np.full((32, 3), -LARGEST, np.int16),
        np.eye(16, 256, dtype=np.int16) * LARGEST,
        whole(logistic(3, [0.1, 0.4, 3.0, 80.0, 300.0], 3)),
        np.asfortranarray(whole(logistic(4, [0.2, 5.0], 7))),
    ],
    ids=["zeros", "one row", "escapes", "sparse escapes", "every kind", "fortran order"],
)
def test_edges(codes):
    assert np.array_equal(decode_numbers(encode_numbers(codes), *codes.shape), codes)
    components, starts = codes.astype(np.float32), one_start(len(codes) // BAND)
    data, halves = coded(np.ascontiguousarray(components), starts)
    assert np.array_equal(decode(data, starts, codes.shape[1], trellis=True), halves)
    assert np.abs(halves - 2 * codes.astype(int)).max(initial=0) <= 2


def test_bytes_are_pinned():
    codes = np.zeros((3 * BAND, 5), np.int16)
    codes[:BAND] = np.arange(-40, 40).reshape(BAND, 5)
    codes[40, 1], codes[47, 0] = -2, 700
    data = encode_numbers(codes)
    assert data.hex() == (
        "ab1a2200d4717d21d721b22916f2922197daa60a10111c233e93e0025a984355c52e4e291732727683761887834359ea86d5cfd2"
        "10d33c7c976ba06b74681f7d979da09dce6ac8c203e485b53ec9c65ed6ec0f43b85f0c250c259e99b86170e470e4e2975c1f84a6"
        "84a67c1f08b908b908b96860e037e037e037fc3f99590c2570e484a608b9e037"
    )
    starts = one_start(3, 2)
    data, halves = coded(codes.astype(np.float32) + np.float32(0.3), starts)
    assert data.hex() == (
        "ab2aa600f2017b4e115221487eb25339976aa68a90121013b872dad228330da926308f26192bc6a7cb7770e73e085e585f4e10d7"
        "d2da105b278cec0b0de8b10d306f59706270f917fbb0d14694d55a7c75f2e0ca15a0f4e0f4e0701f012305180518559f6cf97f79"
        "7f79ac203199fee8fee8c12263b88ed98ed9ffcf7aa9f4e005187f79fee88ed9"
    )
    assert np.array_equal(reference.decode(data, starts.tolist(), 5, trellis=True), halves)


def test_zeros_take_a_header_and_next_to_nothing():
    assert len(encode_numbers(np.zeros((384 * 16, 256), np.int16))) <= HEADER_BYTES + 384 // 4


@pytest.mark.parametrize(
    ("scale", "most"), [(0.15, 1.06), (0.3, 1.03), (0.5, 1.03), (1.0, 1.02), (3.3, 1.02), (25.0, 1.02), (120.0, 1.02)]
)
def test_size_is_close_to_the_entropy(scale, most):
    codes = whole(logistic(0, [scale] * 60, 256))
    counts = np.unique(np.abs(codes.astype(int)), return_counts=True)[1]
    ideal = -(counts * np.log2(counts / codes.size)).sum() + np.count_nonzero(codes)
    assert len(encode_numbers(codes)) * 8 <= most * ideal + 8 * HEADER_BYTES + 8 * 60


def test_scales_follow_bands_and_rows():
    mixed = whole(logistic(0, [0.2, 50.0] * 20, 256))
    apart = sum(len(encode_numbers(whole(logistic(0, [scale] * 20, 256)))) for scale in (0.2, 50.0))
    assert len(encode_numbers(mixed)) <= 1.01 * apart
    loud = logistic(0, [2.0] * 60, 256) * np.where(np.arange(256) % 2, 2, 0.5).astype(np.float32)
    halves = sum(len(encode_numbers(whole(loud[:, part::2]))) for part in (0, 1))
    assert len(encode_numbers(whole(loud))) <= 1.01 * halves


# -- damage -----------------------------------------------------------------------------------------------------------

STARTS = one_start(5, 2)
DATA, _ = coded(logistic(7, [0.1, 0.5, 2.0, 30.0, 400.0], 40), STARTS)
SHAPE = (80, 40)


@pytest.mark.parametrize("length", [0, 3, HEADER_BYTES - 1, HEADER_BYTES, len(DATA) // 2, len(DATA) - 1, len(DATA) - 2])
def test_truncated_data_is_refused(length):
    with pytest.raises(ValueError, match="entropy"):
        decode(DATA[:length], STARTS, 40, trellis=True)


@pytest.mark.parametrize("more", [b"\0", b"\0\0", b"\1\2\3\4"])
def test_data_that_goes_on_is_refused(more):
    with pytest.raises(ValueError, match="entropy"):
        decode(DATA + more, STARTS, 40, trellis=True)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_damage_ends_in_codes_or_an_error(at, value):
    damaged = bytearray(DATA)
    damaged[at] ^= value
    with suppress(ValueError):
        assert decode(bytes(damaged), STARTS, 40, trellis=True).shape == SHAPE


@given(st.binary(max_size=400), st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4), st.booleans())
def test_garbage_ends(tail, states, trellis):
    data = struct.pack("<4I", *(state | START for state in states)) + tail
    with suppress(ValueError):
        assert decode(data, STARTS, 40, trellis=trellis).shape == SHAPE


def test_other_shapes_are_refused():
    for bands, rows in ((5, 39), (5, 41), (4, 40), (6, 40)):
        with pytest.raises(ValueError, match="entropy"):
            decode(DATA, one_start(bands, 2), rows, trellis=True)
