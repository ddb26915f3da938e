"""Format ``bands/1``: pinned bytes, the CPU kernels against the specification, bounds and rates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_ops.band_codes import BAND, Bands, pack_codes, packed_bytes, scale_of, to_components, unpack_codes
from triton_ops.band_codes.cpu_decode import decode
from triton_ops.band_codes.cpu_encode import LAGRANGE, OUTLIER_BITS, encode

THRESHOLD = math.sqrt(LAGRANGE * OUTLIER_BITS)  # 1.92 steps
SEEDS = st.integers(0, 2**32 - 1)


def bits_of(x: torch.Tensor | np.ndarray) -> torch.Tensor:
    """float32 as its bits: the only equality that NaN and both zeros pass."""
    return torch.as_tensor(np.ascontiguousarray(x)).view(torch.int32)


def make_bands(seed: int, rows: int, widths: list[int], outliers: int) -> Bands:
    """Codes, scales and outliers at random, every bit pattern allowed."""
    rng = np.random.default_rng(seed)
    total = len(widths) * rows * BAND
    wide = np.array(widths, np.uint8)
    where = np.sort(rng.choice(total, min(outliers, total), replace=False)).astype(np.int64)
    return Bands(
        rows,
        wide,
        rng.integers(0, 256, len(widths)).astype(np.uint8),
        rng.integers(0, 256, packed_bytes(wide, rows)).astype(np.uint8),
        where,
        rng.integers(0, 65536, len(where)).astype(np.uint16).view(np.float16),
    )


def laplace(seed: int, rows: int, bands: int, scale: float) -> np.ndarray:
    values = np.random.default_rng(seed).laplace(0, scale, (rows, bands * BAND))
    return np.clip(values, -32767, 32767).astype(np.float32)


PINNED = Bands(
    rows=2,
    widths=np.array([1, 0, 3], np.uint8),
    scales=np.array([64, 0, 69], np.uint8),
    packed=np.frombuffer(bytes.fromhex("0180ff0088c6fa88c6fa000000ffffff"), np.uint8),
    where=np.array([3, 33, 95], np.int64),
    values=np.array([2.5, -7.0, 65504.0], np.float16),
)


def test_decoded_bits_are_pinned():
    found = to_components(PINNED, 0, 2)
    assert torch.equal(bits_of(decode(PINNED, 0, 2)), bits_of(found))
    half = [0.5] + 14 * [-0.5] + [0.5]
    half[3] = 2.5  # an outlier
    assert found[0, :16].tolist() == half
    assert found[1, :16].tolist() == 8 * [0.5] + 8 * [-0.5]
    assert found[0, 16:32].tolist() == [0.0, -7.0] + 14 * [0.0]
    assert found[1, 16:32].tolist() == 16 * [0.0]
    step = float(np.float32(1.1892071) * 2)  # index 69 is 5 quarters above scale 1
    codes = torch.arange(8).repeat(2)  # 0x88c6fa: 3 bits each, least significant first
    assert torch.equal(found[0, 32:], (codes - 3.5) * torch.tensor(step))
    assert found[1, 32:].tolist() == [-3.5 * step] * 8 + [3.5 * step] * 7 + [65504.0]


def test_scales_are_pinned():
    found = scale_of(np.array([0, 63, 64, 65, 66, 67, 68, 255], np.uint8))
    assert found.dtype == np.float32
    assert found.view(np.uint32).tolist() == [
        0x37800000, 0x3F5744FD, 0x3F800000, 0x3F9837F0, 0x3FB504F3, 0x3FD744FD, 0x40000000, 0x575744FD,
    ]  # fmt: skip
    every = scale_of(np.arange(256, dtype=np.uint8)).astype(np.float64)
    assert np.allclose(np.log2(every), np.arange(256) / 4 - 16, rtol=0, atol=1e-7)


def test_encoded_bytes_are_pinned():
    # a band of one magnitude, a band of nothing and one outlier, a band on the levels of 6 bits and scale 1
    values = np.zeros((2, 3 * BAND), np.float32)
    values[:, :BAND] = np.where(np.arange(BAND) % 3 == 0, 4.0, -4.0)
    values[1, 18] = 100.0
    values[:, 2 * BAND :] = np.arange(2 * BAND).reshape(2, BAND) - 15.5
    bands, kept = encode(values)
    assert (bands.widths.tolist(), bands.scales.tolist()) == ([3, 0, 6], [70, 0, 64])
    assert bands.packed.tobytes().hex() == (
        "952a55aa54a9952a55aa54a9" "50244d54655d58a66d5ce77d" "60288e64699e68aaae6cebbe"
    )  # fmt: skip
    assert (bands.where.tolist(), bands.values.tolist()) == ([50], [100.0])
    assert np.array_equal(kept[:, BAND:], values[:, BAND:])
    assert np.array_equal(kept[:, :BAND], np.sign(values[:, :BAND]) * 1.5 * scale_of(np.uint8(70)))


@given(SEEDS, st.integers(1, 40), st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(0, 9), st.data())
def test_kernel_decodes_what_the_reference_says(seed, rows, widths, outliers, data):
    bands = make_bands(seed, rows, widths, outliers)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole = to_components(bands, 0, rows)
    want = to_components(bands, start, stop)
    assert torch.equal(bits_of(want), bits_of(whole[start:stop]))
    assert torch.equal(bits_of(decode(bands, start, stop)), bits_of(want))
    needed = set((bands.where // (rows * BAND)).tolist())
    wanted = np.array(sorted(needed | data.draw(st.sets(st.integers(0, len(widths) - 1)))), np.int64)
    columns = (wanted[:, None] * BAND + np.arange(BAND)).reshape(-1)
    assert torch.equal(bits_of(decode(bands, start, stop, wanted)), bits_of(want[:, columns]))


@given(st.integers(1, 12), st.integers(1, 9), SEEDS)
def test_unpack_inverts_pack(width, rows, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**width, (rows, BAND)))
    packed = pack_codes(codes, width)
    assert packed.shape == (rows, 2 * width)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_codes(packed, width), codes)


def test_packed_codes_are_pinned():
    codes = torch.zeros(1, BAND, dtype=torch.int64)
    codes[0, :3] = torch.tensor([0x5, 0x1F, 0x2])
    assert pack_codes(codes, 5).numpy().tobytes().hex() == "e50b0000000000000000"


@given(SEEDS, st.sampled_from([1, 2, 33, 252]), st.integers(1, 3), st.floats(-8, 15))
def test_kept_is_what_a_decoder_has_and_errors_are_bounded(seed, rows, bands, log_scale):
    values = laplace(seed, rows, bands, 2.0**log_scale)
    codes, kept = encode(values)
    assert np.array_equal(decode(codes, 0, rows), kept)
    assert torch.equal(bits_of(to_components(codes, 0, rows)), bits_of(kept))
    assert len(codes.packed) == packed_bytes(codes.widths, rows)
    assert (np.diff(codes.where) > 0).all()
    # an outlier is off by its rounding to float16, everything else by the threshold at most
    bound = np.maximum(THRESHOLD, np.abs(values) * 2.0**-11) * (1 + 1e-6)
    assert (np.abs(kept - values) <= bound).all()


@pytest.mark.parametrize(("sigma", "most_bits", "most_error"), [(0.1, 0.01, 0.011), (1, 2.4, 0.15), (30, 8.2, 0.09)])
@pytest.mark.parametrize("kind", ["normal", "laplace"])
def test_rate_and_distortion(kind, sigma, most_bits, most_error):
    rng = np.random.default_rng(1)
    values = rng.normal(0, sigma, (252, 64)) if kind == "normal" else rng.laplace(0, sigma / 2**0.5, (252, 64))
    codes, kept = encode(values.astype(np.float32))
    bits = (8 * len(codes.packed) + OUTLIER_BITS * len(codes.where)) / values.size
    assert bits <= most_bits
    assert np.mean((kept - values) ** 2) <= most_error


@pytest.mark.parametrize("rows", [1, 7, 256])
def test_zeros_take_no_bytes(rows):
    codes, kept = encode(np.zeros((rows, 48), np.float32))
    assert (codes.packed.size, codes.where.size) == (0, 0)
    assert not kept.any()
    assert not decode(codes, 0, rows).any()
    assert decode(codes, 0, rows, np.empty(0, np.int64)).shape == (rows, 0)


def test_many_outliers_are_all_kept():
    values = np.zeros((64, 32), np.float32)
    values[::2, ::3] = np.linspace(20, 30000, 11, dtype=np.float32)
    codes, kept = encode(values)
    assert len(codes.where) > 64 + values.size // 100  # more than the first guess of room
    assert np.array_equal(decode(codes, 0, 64), kept)
    assert (np.abs(kept - values) <= np.maximum(THRESHOLD, values * 2.0**-11)).all()
