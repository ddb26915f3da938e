"""Encoded blocks: pinned bytes, round trips, and every kind of damage refused before the pool is touched."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.codec import (
    CODECS,
    BlockDamaged,
    PoolRows,
    RowLayout,
    block_limit,
    decode_block,
    encode_block,
    exact_rows,
    fingerprint,
    make_codec,
)
from sglang_plt.codec.block import HEADER_BYTES, check_block
from tests.codec.pools import NAN, all_bytes, make_pool, make_rotary, some_slots

MODEL = fingerprint("some-model", 7)
PINNED = (  # FORMAT.md, "Example"
    "504c544201000100696e743400000000efcdab8967452301"
    "0100000001000000040000000200000001000100020000000a0000000000000020000000000000000000000000000000"
    "165b14ad004ae82f"
    "00c0662e004000bc003cfa29452c003c00c06732003c003cf0ff0f00f00f0000"
)


def pinned_pool() -> PoolRows:
    keys = torch.tensor([[[-2.0, 0.8, 3.0, 14.0]], [[13.0, 0.1, 2.0, -1.0]]])
    values = torch.tensor([[[-2.0, 1.0]], [[16.0, 1.0]]])
    return PoolRows(RowLayout(1, 1, 4, 2, torch.float32), (keys,), (values,))


def damaged(block: np.ndarray, at: int, value: int) -> np.ndarray:
    copy = block.copy()
    copy[at] ^= value
    return copy


def test_bytes_are_pinned():
    block = encode_block(make_codec("int4", pinned_pool(), None), 0x0123456789ABCDEF, torch.tensor([0, 1]), 10)
    assert block.tobytes().hex() == PINNED
    assert not block.flags.writeable


def test_fingerprints_are_pinned_and_do_not_collide_by_joining():
    assert fingerprint("model", 1) == 0xC6EE9406658F5CEE
    assert len({fingerprint("a", "b"), fingerprint("ab"), fingerprint(1), fingerprint("1"), fingerprint()}) == 5
    with pytest.raises(TypeError, match="str or int, got float"):
        fingerprint(1.0)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("num_rows", "position"), [(1, 0), (3, 0), (100, 2), (256, 4), (256, 700)])
def test_round_trip(name, num_rows, position):
    pool, target, slots = make_pool(), make_pool(fill=NAN), some_slots(num_rows)
    codec = make_codec(name, pool, make_rotary())
    block = encode_block(codec, MODEL, slots, position)
    num_exact = exact_rows(position, num_rows)
    assert num_exact == max(0, min(num_rows, 4 - position))
    assert len(block) == block_limit(codec, num_rows, num_exact)
    decode_block(make_codec(name, target, make_rotary()), MODEL, block, 0, num_rows, slots, position)
    for got, want in zip(target.keys + target.values, pool.keys + pool.values, strict=True):
        assert (got[slots] - want[slots]).abs().max() < 1.0
        assert torch.equal(got[slots[:num_exact]], want[slots[:num_exact]])


@pytest.fixture(scope="module", params=CODECS)
def case(request):
    """A codec over a pool of NaN, and a block it may decode."""
    slots = some_slots(5)
    block = encode_block(make_codec(request.param, make_pool(), make_rotary()), MODEL, slots, 2)
    return make_codec(request.param, make_pool(fill=NAN), make_rotary()), block, slots


FIELDS = {
    "magic": 0, "format_version": 4, "codec_version": 6, "codec": 8, "fingerprint": 16, "num_layers": 24,
    "kv_heads": 28, "head_dim": 32, "v_head_dim": 36, "dtype": 40, "flags": 42, "num_rows": 44, "num_exact": 46,
    "position": 48, "payload_bytes": 56, "profile": 64, "checksum": 72,
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_damage_in_a_field_is_named(case, field):
    codec, block, slots = case
    expected = {
        "num_rows": "(payload_bytes|num_exact|num_rows)",
        "position": "(num_exact|checksum)",
    }.get(field, field)
    with pytest.raises(BlockDamaged, match=f"^{expected}: expected"):
        decode_block(codec, MODEL, damaged(block, FIELDS[field], 2), 0, 5, slots, 2)


def test_every_flipped_bit_is_refused_and_the_pool_untouched(case):
    codec, block, slots = case
    before = all_bytes(codec.pool)
    bits = [(at, 1 << bit) for at in range(HEADER_BYTES) for bit in range(8)]
    bits += [(at, 1 << at % 8) for at in range(HEADER_BYTES, len(block), 13)]
    for at, value in bits:
        with pytest.raises(BlockDamaged):
            decode_block(codec, MODEL, damaged(block, at, value), 0, 5, slots, 2)
    assert torch.equal(all_bytes(codec.pool), before)


@cache
def a_codec_and_its_block():
    codec = make_codec("int4", make_pool(), make_rotary())
    return codec, encode_block(codec, MODEL, some_slots(5), 2)


@given(st.binary(max_size=300), st.integers(0, 120))
def test_arbitrary_bytes_are_refused(tail, keep):
    codec, block = a_codec_and_its_block()
    with pytest.raises(BlockDamaged):
        check_block(codec, MODEL, np.concatenate((block[:keep], np.frombuffer(tail, np.uint8))))


def test_wrong_lengths_are_refused(case):
    codec, block, slots = case
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(block) - 16, len(block) - 1):
        with pytest.raises(BlockDamaged, match=r"^truncated"):
            decode_block(codec, MODEL, block[:length], 0, 5, slots, 2)
    with pytest.raises(BlockDamaged, match=r"^truncated"):
        decode_block(codec, MODEL, np.concatenate((block, block[:1])), 0, 5, slots, 2)


def test_blocks_of_others_are_refused(case):
    codec, block, slots = case
    with pytest.raises(BlockDamaged, match=r"^fingerprint"):
        decode_block(codec, MODEL + 1, block, 0, 5, slots, 2)
    others = [name for name in CODECS if name != codec.name]
    with pytest.raises(BlockDamaged, match=r"^codec"):
        decode_block(make_codec(others[0], codec.pool, make_rotary()), MODEL, block, 0, 5, slots, 2)
    with pytest.raises(BlockDamaged, match=r"^num_layers: expected 1, got 2"):
        decode_block(make_codec(codec.name, make_pool(layers=1), make_rotary()), MODEL, block, 0, 5, slots, 2)
    if codec.name != "raw":
        with pytest.raises(BlockDamaged, match=r"^flags: expected 1, got 0"):
            decode_block(make_codec(codec.name, codec.pool, None), MODEL, block, 0, 5, slots, 2)


def test_rotated_rows_serve_their_own_position_only(case):
    codec, block, slots = case
    before = all_bytes(codec.pool)
    with pytest.raises(BlockDamaged, match=r"^position: keys are stored rotated at 2, asked for 3"):
        decode_block(codec, MODEL, block, 0, 5, slots, 3)  # its first two rows are exact
    assert torch.equal(all_bytes(codec.pool), before)
    if codec.name == "raw":
        with pytest.raises(BlockDamaged, match=r"^position"):
            decode_block(codec, MODEL, block, 2, 5, slots[2:], 3)
    else:
        decode_block(codec, MODEL, block, 2, 5, slots[2:], 3)


def test_block_sizes_outside_1_to_256_are_refused():
    codec = make_codec("raw", make_pool(), None)
    for num_rows in (0, 257):
        with pytest.raises(ValueError, match=f"need 1 to 256 slots, got {num_rows}"):
            encode_block(codec, MODEL, some_slots(num_rows), 0)


def test_format_document_shows_the_pinned_block():
    text = (Path(__file__).parents[2] / "FORMAT.md").read_text()
    example = text.split("## Example")[1].split("```")[1].strip().splitlines()
    assert "".join(line[:55].replace(" ", "") for line in example) == PINNED
