"""Both packings: what a decoder has, bytes of several units, row ranges, long gaps, damage."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.codec.packing import LARGEST, _gaps, _positions
from sglang_plt.codec.packings import PACKINGS
from triton_ops.band_codes import BAND, Bands

CPU = torch.device("cpu")
NAMES = sorted(PACKINGS)


def components(seed: int, rows: int, width: int, scale: float = 4.0) -> torch.Tensor:
    """Laplace components whose sizes fall along the width, a few of them huge."""
    rng = np.random.default_rng(seed)
    values = rng.laplace(0, scale * 2.0 ** -np.linspace(0, 6, width), (rows, width))
    values[rng.random(values.shape) < 0.002] *= 300
    return torch.from_numpy(values.clip(-LARGEST, LARGEST).astype(np.float32))


def dense(packing, stored, start: int, stop: int, width: int) -> torch.Tensor:
    """All components of a row range, as a decoder puts them together."""
    values, used = packing.dequantise(stored, start, stop, CPU)
    assert values.dtype == torch.float32
    assert len(used) == values.shape[1]
    out = torch.zeros(stop - start, -(-width // BAND) * BAND)
    out[:, used] = values
    return out[:, :width]  # what stands behind is padding


@pytest.mark.parametrize("name", NAMES)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 100, 256]), st.lists(st.integers(1, 70), min_size=1, max_size=4)
)
def test_a_decoder_has_what_was_kept(name, seed, rows, widths):
    packing, rng = PACKINGS[name], np.random.default_rng(seed)
    units = [components(seed + i, rows, width, 2.0 ** rng.integers(-6, 9)) for i, width in enumerate(widths)]
    stored, kept = zip(*(packing.quantise(unit) for unit in units), strict=True)
    data = packing.pack(stored)
    found = packing.unpack(memoryview(data), widths, rows)
    start, stop = sorted(rng.integers(0, rows + 1, 2).tolist())
    for unit, fresh, want, width in zip(found, stored, kept, widths, strict=True):
        assert want.shape == (rows, width)
        assert torch.equal(dense(packing, unit, 0, rows, width), want)
        assert torch.equal(dense(packing, unit, start, stop, width), want[start:stop])
        if width % BAND == 0:
            assert torch.equal(dense(packing, fresh, start, stop, width), want[start:stop])


@pytest.mark.parametrize(("name", "most"), [("dense", 1.0), ("fast", 1.93)])
def test_errors_are_bounded_in_steps(name, most):
    values = components(1, 256, 100, 200.0)
    _, kept = PACKINGS[name].quantise(values)
    assert ((kept - values).abs() <= values.abs().mul(2.0**-11).clamp_min(most)).all()


@pytest.mark.parametrize("name", ["dense", "fast"])
def test_the_largest_component_is_kept(name):
    values = torch.zeros(3, 32)
    values[1, 3], values[2, 31] = LARGEST, -LARGEST
    packing = PACKINGS[name]
    stored, kept = packing.quantise(values)
    (found,) = packing.unpack(memoryview(packing.pack([stored])), [32], 3)
    assert torch.equal(dense(packing, found, 0, 3, 32), kept)
    assert (kept - values).abs().max() <= 1


@pytest.mark.parametrize(("name", "most"), [("dense", 64), ("fast", 4 + 2 * 24)])
def test_nothing_takes_next_to_nothing(name, most):
    packing = PACKINGS[name]
    stored, kept = packing.quantise(torch.zeros(256, 24 * BAND))
    assert not kept.any()
    data = packing.pack([stored])
    assert len(data) <= most
    values, used = packing.dequantise(packing.unpack(memoryview(data), [24 * BAND], 256)[0], 3, 9, CPU)
    assert (values.shape, len(used)) == ((6, 0), 0)


def test_fixed_bytes_are_pinned():
    # two units of one band over two rows; the second has nothing but an outlier behind a gap of 15 + 18
    first, second = torch.zeros(2, BAND), torch.zeros(2, BAND)
    first[:] = torch.where(torch.arange(BAND) % 3 == 0, 4.0, -4.0)
    second[1, 2] = 100.0
    packing = PACKINGS["fast"]
    data = packing.pack([packing.quantise(unit)[0] for unit in (first, second)])
    assert data.hex() == "01000000" "0300" "4600" "3200" "4056" "952a55aa54a9952a55aa54a9"  # fmt: skip


@given(st.sets(st.integers(0, 400_000), max_size=8), st.sets(st.sampled_from([65534, 65535, 65536, 131070, 131071])))
def test_gaps_of_any_length(some, edges):
    where = np.array(sorted(some | edges), np.int64)
    values = np.arange(1, len(where) + 1).astype(np.float16)
    gaps, kept = _gaps(where, values)
    assert len(gaps) == len(kept)
    back, same = _positions(gaps, kept)
    assert back.tolist() == where.tolist()
    assert same.tolist() == values.tolist()


def test_outliers_further_apart_than_a_gap_can_say():
    rows, bands = 256, 40  # 163,840 components: the only outliers are the first and the last
    values = np.array([5.0, -6.0], np.float16)
    unit = Bands(
        rows,
        np.zeros(bands, np.uint8),
        np.zeros(bands, np.uint8),
        np.empty(0, np.uint8),
        np.array([0, rows * bands * BAND - 1]),
        values,
    )
    packing = PACKINGS["fast"]
    data = packing.pack([unit])
    assert len(data) == 4 + 2 * bands + 4 * (2 + 2)
    (found,) = packing.unpack(memoryview(data), [bands * BAND], rows)
    assert found.where.tolist() == unit.where.tolist()
    out = dense(packing, found, 0, rows, bands * BAND)
    assert (float(out[0, 0]), float(out[-1, -1]), int((out != 0).sum())) == (5.0, -6.0, 2)


@pytest.mark.parametrize("name", NAMES)
def test_damage_ends_in_values_or_an_error(name):
    packing, rng = PACKINGS[name], np.random.default_rng(0)
    widths, rows = [40, 16], 20
    data = packing.pack([packing.quantise(components(i, rows, width))[0] for i, width in enumerate(widths)])
    for length in (0, 3, 5, 11, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match=r"."):
            packing.unpack(memoryview(data[:length]), widths, rows)
    with pytest.raises(ValueError, match=r"."):
        packing.unpack(memoryview(data + b"\0\0\0"), widths, rows)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= int(rng.integers(1, 256))
        try:
            found = packing.unpack(memoryview(bytes(damaged)), widths, rows)
        except ValueError:
            continue
        for unit in found:
            packing.dequantise(unit, 0, rows, CPU)
