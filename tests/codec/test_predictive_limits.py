"""Codecs ``fast`` and ``dense`` on rows that their profile is not of: escaped rows, the fallback, refusals."""

import numpy as np
import pytest
import torch

from sglang_plt.codec import (
    BlockDamaged,
    EncodeError,
    Profile,
    block_limit,
    decode_block,
    encode_block,
    exact_rows,
    make_codec,
)
from sglang_plt.codec.block import HEADER_BYTES, check_block
from tests.codec.correlated import MODEL, NAMES, ROTARY, SOURCE, STEP, Source, bits, profile_of, read, round_trip
from tests.codec.pools import all_bytes, some_slots


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6, -3e38])
@pytest.mark.parametrize("rotary", [None, ROTARY], ids=["rotated", "rotary"])
def test_a_row_outside_the_format_is_escaped_and_its_neighbours_are_not(name, bad, rotary):
    profile, slots = profile_of(SOURCE, name, rotary is None), some_slots(100)
    pool, target = SOURCE.pool(SOURCE.rows(100, 1), slots, rotary, 300), SOURCE.empty(fill=0.0)
    pool.values[1][slots[37], 1, 5] = bad
    pool.values[2][slots[37], 0, 15] = bad
    block = encode_block(make_codec(name, pool, rotary, profile), MODEL, slots, 300)
    decode_block(make_codec(name, target, rotary, profile), MODEL, block, 0, 100, slots, 300)
    rest = torch.arange(100) != 37
    assert (read(target, slots[rest], None, 0) - read(pool, slots[rest], None, 0)).abs().max() <= 6 * STEP
    for want, got in zip(pool.keys, target.keys, strict=True):
        torch.testing.assert_close(got[slots[37]], want[slots[37]], rtol=0, atol=0 if rotary is None else 1e-5)
    for want, got in zip(pool.values, target.values, strict=True):
        assert torch.equal(got[slots[37]].view(torch.int32), want[slots[37]].view(torch.int32))
    for start, stop in ((0, 37), (37, 40), (37, 38), (38, 100)):
        again = SOURCE.empty(fill=0.0)
        decode_block(make_codec(name, again, rotary, profile), MODEL, block, start, stop, slots[start:stop], 300)
        for one, other in zip((*again.keys, *again.values), (*target.keys, *target.values), strict=True):
            one, other = one[slots[start:stop]], other[slots[start:stop]]
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_rows_far_from_the_profile_are_escaped(name):
    rows = SOURCE.rows(100, 1)
    for row in rows:
        row[11] = row[11] * 5000  # below 65504, but more than 16383 steps
    block, want, got = round_trip(name, SOURCE, rows, ROTARY)
    assert want[:, 11].abs().max() < 65504
    torch.testing.assert_close(got[:, 11], want[:, 11], rtol=1e-5, atol=0.05)
    rest = torch.arange(100) != 11
    assert (got - want)[:, rest].abs().max() <= 6 * STEP
    assert bits(block, SOURCE, 100) < 8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [30, 1000])
def test_what_a_profile_does_not_fit_is_stored_as_int8(name, factor):
    rows = [row * factor for row in SOURCE.rows(256, 1)]
    block, want, got = round_trip(name, SOURCE, rows, ROTARY)
    plain, _, other = round_trip("int8", SOURCE, rows, ROTARY)
    codec = make_codec(name, SOURCE.empty(), ROTARY, profile_of(SOURCE, name))
    assert len(block) <= block_limit(codec, 256, 0) == len(plain) + 8
    assert (got - want).abs().max() <= want.abs().max() / 100
    if block[HEADER_BYTES] == 1:
        assert torch.equal(got, other)
    else:
        assert factor == 30


def test_the_fallback_is_taken():
    rows = [row * 1000 for row in SOURCE.rows(256, 1)]
    for name in NAMES:
        block, _, _ = round_trip(name, SOURCE, rows, ROTARY, position=0)
        assert block[HEADER_BYTES : HEADER_BYTES + 8].tobytes().hex() == "010000000000803f"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_rows", [1, 3, 40, 256])
def test_any_rows_stay_below_the_limit(name, num_rows):
    codec, generator = make_codec(name, SOURCE.empty(), ROTARY, profile_of(SOURCE, name)), torch.Generator()
    for exponent in range(-6, 4):
        for position in (0, 900 - num_rows):
            rows = [10.0**exponent * torch.randn(row.shape, generator=generator) for row in SOURCE.rows(num_rows, 1)]
            block, _, _ = round_trip(name, SOURCE, rows, ROTARY, position=position)
            assert len(block) <= block_limit(codec, num_rows, exact_rows(position, num_rows))


@pytest.mark.parametrize("name", NAMES)
def test_a_block_of_nothing_but_nan_is_refused(name):
    slots, pool = some_slots(100), SOURCE.empty()
    codec = make_codec(name, pool, ROTARY, profile_of(SOURCE, name))
    with pytest.raises(EncodeError, match="codec int8: layer 0"):
        encode_block(codec, MODEL, slots, 300)
    block = encode_block(codec, MODEL, slots[:4], 0)  # exact rows hold anything
    target = SOURCE.empty(fill=0.0)
    decode_block(make_codec(name, target, ROTARY, codec.profile), MODEL, block, 0, 4, slots[:4], 0)
    assert target.keys[2][slots[:4]].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rows_give_the_same_bytes(name):
    rows = SOURCE.rows(130, 1)
    first, _, _ = round_trip(name, SOURCE, rows, ROTARY)
    second, _, _ = round_trip(name, SOURCE, rows, ROTARY)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_other_rows_are_refused(name):
    profile = profile_of(SOURCE, name)
    for other in (Source(heads=1), Source(dim=20, v_dim=12), Source(layers=4)):
        with pytest.raises(ValueError, match=f"codec {name}: the profile is of other rows"):
            make_codec(name, other.empty(), ROTARY, profile)
    with pytest.raises(ValueError, match="the profile is of other rows"):
        make_codec(name, SOURCE.empty(), None, profile)  # keys would be stored rotated
    with pytest.raises(ValueError, match=f"codec '{name}' needs a profile"):
        make_codec(name, SOURCE.empty(), ROTARY)


def test_a_basis_without_inverse_is_refused():
    made = profile_of(SOURCE, "fast")
    made.units[1].basis.codes[5].zero_()
    broken = Profile.make(made.info, made.units)
    profile_of.cache_clear()
    with pytest.raises(ValueError, match="basis of layers 1 to 1 has no inverse"):
        make_codec("fast", SOURCE.empty(), ROTARY, broken)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_another_profile_are_refused(name):
    block, _, _ = round_trip(name, SOURCE, SOURCE.rows(50, 1), ROTARY)
    other = make_codec(name, SOURCE.empty(), ROTARY, profile_of(SOURCE, name, seed=101))
    with pytest.raises(BlockDamaged, match=r"^profile: expected"):
        check_block(other, MODEL, block)
    with pytest.raises(BlockDamaged, match=r"^codec_version: expected"):
        check_block(make_codec("int8", SOURCE.empty(), ROTARY), MODEL, block)


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_caught_before_the_pool_is_touched(name):
    block, _, _ = round_trip(name, SOURCE, SOURCE.rows(50, 1), ROTARY)
    pool = SOURCE.empty()
    codec, before = make_codec(name, pool, ROTARY, profile_of(SOURCE, name)), all_bytes(pool)
    for at in range(HEADER_BYTES, len(block), 11):
        damaged = block.copy()
        damaged[at] ^= 1 << at % 8
        with pytest.raises(BlockDamaged, match=r"^checksum"):
            decode_block(codec, MODEL, damaged, 0, 50, some_slots(50), 300)
    with pytest.raises(BlockDamaged, match=r"^truncated"):
        decode_block(codec, MODEL, block[:-1], 0, 50, some_slots(50), 300)
    assert torch.equal(all_bytes(pool), before)


@pytest.mark.parametrize("name", NAMES)
def test_positions_outside_the_table_are_refused_before_the_pool_is_touched(name):
    block, _, _ = round_trip(name, SOURCE, SOURCE.rows(50, 1), ROTARY)
    pool = SOURCE.empty()
    codec, before = make_codec(name, pool, ROTARY, profile_of(SOURCE, name)), all_bytes(pool)
    for call in (
        lambda: decode_block(codec, MODEL, block, 0, 50, some_slots(50), 1000),
        lambda: encode_block(codec, MODEL, some_slots(50), 1000),
    ):
        with pytest.raises(ValueError, match=r"positions 0\.\.1023, got 1000\.\.1049"):
            call()
    assert torch.equal(all_bytes(pool), before)


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_leaves_the_pool_alone(name):
    pool = SOURCE.empty()
    before = all_bytes(pool)
    make_codec(name, pool, ROTARY, profile_of(SOURCE, name)).warm_up()
    assert torch.equal(all_bytes(pool), before)
