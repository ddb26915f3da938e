"""Codecs ``fast`` and ``dense`` on rows that their profile is of: error bounds, sizes, ranges, positions, pools."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.codec import PoolRows, block_limit, decode_block, encode_block, exact_rows, make_codec
from tests.codec.correlated import MODEL, NAMES, ROTARY, SOURCE, STEP, Source, bits, profile_of, read, round_trip
from tests.codec.pools import make_rotary, some_slots

RMS = {"fast": 0.45 * STEP, "dense": 0.31 * STEP, "hadamard": 0.42 * STEP}
"""Uniform rounding alone is 0.289 steps."""

SHAPES = {
    "gqa": (Source(), make_rotary(16)),
    "gptj": (Source(heads=1), make_rotary(16, is_neox=False)),
    "partial": (Source(), make_rotary(8)),
    "yarn": (Source(), make_rotary(16, magnitude=1.3)),
    "rotated": (Source(), None),
    "dim 20": (Source(dim=20, v_dim=20), make_rotary(20)),
    "mha dim 80": (Source(layers=2, heads=4, dim=80, v_dim=80), make_rotary(32)),
    "value dim differs": (Source(dim=24, v_dim=10), make_rotary(24)),
    "one layer": (Source(layers=1), make_rotary(16)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_errors_stay_within_the_step(name, shape):
    source, rotary = shape
    block, want, got = round_trip(name, source, source.rows(200, 1), rotary)
    scale = 1.0 if rotary is None else float((rotary.cos_sin**2).sum(1).mean() * 2 / rotary.rotary_dim) ** 0.5
    assert bits(block, source, 200) < 8
    for layer in range(source.layers):  # closed loop: the last layer is no worse than the first
        assert (got[layer] - want[layer]).pow(2).mean().sqrt() <= RMS[name] * max(1.0, scale)
    assert (got - want).abs().max() <= 6 * STEP


@settings(max_examples=25)
@given(
    st.builds(Source, st.integers(1, 4), st.integers(1, 3), st.integers(1, 25), st.integers(0, 25)),
    st.sampled_from(NAMES),
    st.integers(1, 60),
    st.integers(0, 5),
    st.sampled_from([1, 3]),
)
def test_any_shape(source, name, num_rows, position, group):
    profile = profile_of(source, name, rotated=True, group=group)
    _, want, got = round_trip(name, source, source.rows(num_rows, 1), None, position, profile)
    assert (got - want).abs().max() <= 6 * STEP
    assert torch.equal(got[:, : exact_rows(position, num_rows)], want[:, : exact_rows(position, num_rows)])
    _, _, part = round_trip(name, source, source.rows(num_rows, 1), None, position, profile, num_rows // 2)
    torch.testing.assert_close(part, got[:, num_rows // 2 :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("predicts", [True, False])
def test_units_of_several_layers(group, predicts):
    source = Source(layers=5)
    for name in NAMES:
        profile = profile_of(source, name, group=group, predicts=predicts)
        _, want, got = round_trip(name, source, source.rows(150, 1), ROTARY, profile=profile)
        assert (got - want).pow(2).mean((1, 2)).sqrt().max() <= RMS[name]


@pytest.mark.parametrize("name", NAMES)
def test_prediction_saves_bits_and_a_smaller_step_costs_them(name):
    rows = SOURCE.rows(256, 1)
    sizes = {}
    for predicts in (True, False):
        profile = profile_of(SOURCE, name, predicts=predicts)
        block, want, got = round_trip(name, SOURCE, rows, ROTARY, profile=profile)
        sizes[predicts] = bits(block, SOURCE, 256)
    assert sizes[True] < 0.8 * sizes[False]
    if name == "dense":
        tight, want, got = round_trip("dense-tight", SOURCE, rows, ROTARY, profile=profile)
        assert 0.9 < bits(tight, SOURCE, 256) - sizes[False] < 1.2  # -log2(0.47) = 1.09
        assert (got - want).pow(2).mean().sqrt() <= RMS[name] * 0.47


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pools_of_other_types(name, dtype):
    source = Source(dtype=dtype)
    block, want, got = round_trip(name, source, source.rows(200, 1), ROTARY)
    rounding = float(torch.finfo(dtype).eps) * want.abs().mean()
    assert (got - want).pow(2).mean().sqrt() <= RMS[name] + rounding
    assert bits(block, source, 200) < 6


@pytest.mark.parametrize("name", NAMES)
def test_float8_saturates(name):
    source = Source(dtype=torch.float8_e4m3fn)
    rows = source.rows(60, 1)
    for row in rows:
        row[:, 40] = 448.0  # the largest number; errors would go beyond
    pool = source.pool(rows, some_slots(60), None, 9)
    target, profile = source.empty(), profile_of(source, name, True)
    block = encode_block(make_codec(name, pool, None, profile), MODEL, some_slots(60), 9)
    decode_block(make_codec(name, target, None, profile), MODEL, block, 0, 60, some_slots(60), 9)
    assert (target.values[0][some_slots(60)].float()[:, 0, 8] == 448).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 5), (40, 100), (99, 100), (2, 3), (50, 50)])
def test_row_ranges_are_slices_of_the_whole(name, start, stop):
    rows = SOURCE.rows(100, 1)
    _, _, whole = round_trip(name, SOURCE, rows, ROTARY, position=2)  # two exact rows
    _, _, part = round_trip(name, SOURCE, rows, ROTARY, position=2, start=start, stop=stop)
    torch.testing.assert_close(part, whole[:, start:stop], rtol=0, atol=1e-4)  # sums of another order


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_keys_follow_their_rows_to_another_position(name, is_neox):
    rotary, rows = make_rotary(12, is_neox), SOURCE.rows(64, 1)
    _, _, there = round_trip(name, SOURCE, rows, rotary)
    _, _, moved = round_trip(name, SOURCE, rows, rotary, moved=400)
    torch.testing.assert_close(moved, there, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "position"), [(1, 0), (4, 0), (2, 2), (1, 700), (5, 0), (256, 0), (256, 768)])
def test_first_rows_of_a_sequence_are_exact(name, num_rows, position):
    source, slots = Source(dtype=torch.bfloat16), some_slots(num_rows)
    pool = source.pool(source.rows(num_rows, 1), slots, ROTARY, position)
    exact = exact_rows(position, num_rows)
    for buffer in (*pool.keys, *pool.values):
        buffer[slots[:exact]] *= 1e30  # whatever they hold
    target, profile = source.empty(), profile_of(source, name)
    block = encode_block(make_codec(name, pool, ROTARY, profile), MODEL, slots, position)
    assert len(block) <= block_limit(make_codec(name, pool, ROTARY, profile), num_rows, exact)
    decode_block(make_codec(name, target, ROTARY, profile), MODEL, block, 0, num_rows, slots, position)
    for want, got in zip((*pool.keys, *pool.values), (*target.keys, *target.values), strict=True):
        assert torch.equal(got[slots[:exact]], want[slots[:exact]])
        assert int(got.isnan().flatten(1).any(1).sum()) == len(got) - num_rows  # these rows and no others
    want, got = (read(p, slots[exact:], ROTARY, position + exact) for p in (pool, target))
    assert torch.allclose(got, want, rtol=0, atol=6 * STEP + 0.1)


@pytest.mark.parametrize(("name", "most"), [("fast", 2.6), ("dense", 2.1)])
def test_eight_percent_of_noise_is_made_good_by_the_residual(name, most):
    # the toy experiment of the paper: predictions off by 8 % of the row, their residuals coded, every byte counted
    source = Source(layers=8, noise=0.08)
    block, want, got = round_trip(name, source, source.rows(256, 1), ROTARY)
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.99
    flat = profile_of(source, name, predicts=False)
    apart, _, _ = round_trip(name, source, source.rows(256, 1), ROTARY, profile=flat)
    assert bits(block, source, 256) < min(most, 0.6 * bits(apart, source, 256))


@pytest.mark.parametrize("name", NAMES)
def test_threads_share_a_codec(name):
    slots = some_slots(100)
    codec = make_codec(name, SOURCE.pool(SOURCE.rows(100, 1), slots, ROTARY, 9), ROTARY, profile_of(SOURCE, name))
    want = encode_block(codec, MODEL, slots, 9)
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: encode_block(codec, MODEL, slots, 9), range(16)):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_gpu_pool_gets_the_same_rows(name, device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    rows, profile, slots = SOURCE.rows(100, 1), profile_of(SOURCE, name), some_slots(100)
    pool, target = SOURCE.pool(rows, slots, ROTARY, 2), SOURCE.empty()
    there, back = on_device(pool, device), on_device(SOURCE.empty(), device)
    for source, to in ((pool, back), (there, target)):  # encoded here, decoded there, and the other way round
        block = encode_block(make_codec(name, source, ROTARY, profile), MODEL, slots, 2)
        decode_block(make_codec(name, to, ROTARY, profile), MODEL, block, 0, 100, slots, 2)
        want = read(pool, slots, ROTARY, 2)
        got = read(on_device(to, torch.device("cpu")), slots, ROTARY, 2)
        assert (got - want).abs().max() <= 6 * STEP
        assert torch.equal(got[:, :2], want[:, :2])


def on_device(pool: PoolRows, device: torch.device) -> PoolRows:
    keys, values = (tuple(buffer.to(device) for buffer in kind) for kind in (pool.keys, pool.values))
    return PoolRows(pool.layout, keys, values)
