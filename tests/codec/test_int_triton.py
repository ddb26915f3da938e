"""``int8`` and ``int4`` by Triton kernels (here in the interpreter): the bytes and rows of the torch path."""

import numpy as np
import pytest
import torch

from sglang_plt.codec import EncodeError, IntGroups, begin_block, decode_block, encode_block, make_codec
from sglang_plt.codec.int_triton import TritonIntGroups
from tests.codec.correlated import MODEL, Source, read
from tests.codec.pools import make_rotary, some_slots

SHAPES = {
    "gqa": (Source(layers=2), make_rotary(16)),
    "gptj": (Source(layers=2, heads=1), make_rotary(16, is_neox=False)),
    "partial": (Source(layers=2), make_rotary(8)),
    "rotated keys": (Source(layers=2), None),
    "value dim differs": (Source(layers=1, v_dim=32), make_rotary(16)),
    "bfloat16": (Source(layers=2, dtype=torch.bfloat16), make_rotary(16)),
    "float8": (Source(layers=2, dtype=torch.float8_e4m3fn), None),
}


def both(source, rotary, bits, pool):
    return make_codec(f"int{bits}", pool, rotary, triton=True), IntGroups(pool, rotary, bits, kernels=False)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "position"), [(1, 0), (70, 2), (130, 300)])
def test_bytes_and_rows_are_those_of_torch(bits, shape, num_rows, position):
    source, rotary = SHAPES[shape]
    slots, where = some_slots(num_rows), some_slots(num_rows, seed=2)
    pool = source.pool(source.rows(num_rows, 1), slots, rotary, position)
    triton, torch_path = both(source, rotary, bits, pool)
    assert isinstance(triton, TritonIntGroups)
    block = encode_block(triton, MODEL, slots, position)
    assert np.array_equal(block, encode_block(torch_path, MODEL, slots, position))
    for start, stop in ((0, num_rows), (num_rows // 3, num_rows // 2 + 1)):
        got, want = source.empty(), source.empty()
        for codec in both(source, rotary, bits, got)[:1] + both(source, rotary, bits, want)[1:]:
            decode_block(codec, MODEL, block, start, stop, where[start:stop], position)
        for one, other in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_layers_are_written_one_by_one():
    source, rotary = Source(layers=3), make_rotary(16)
    slots, where = some_slots(80), some_slots(80, seed=2)
    pool, target = source.pool(source.rows(80, 1), slots, rotary, 2), source.empty()
    block = encode_block(make_codec("int8", pool, rotary, triton=True), MODEL, slots, 2)
    writer = begin_block(make_codec("int8", target, rotary, triton=True), MODEL, block, 0, 80, where, 2)
    for layer in range(3):
        assert target.keys[layer][where].isnan().all()
        writer.write_to(layer + 1)
        assert not target.keys[layer][where].isnan().any()
    whole = source.empty()
    decode_block(make_codec("int8", whole, rotary, triton=True), MODEL, block, 0, 80, where, 2)
    assert torch.equal(read(target, where, rotary, 2), read(whole, where, rotary, 2))


def test_rows_that_cannot_be_stored_are_refused():
    source, slots = Source(layers=2), some_slots(30)
    pool = source.pool(source.rows(30, 1), slots, None, 9)
    pool.values[1][slots[7], 0, 3] = float("nan")
    with pytest.raises(EncodeError, match="not finite"):
        encode_block(make_codec("int8", pool, None, triton=True), MODEL, slots, 9)


def test_odd_head_dims_are_refused_and_other_codecs_stay_as_they_are():
    with pytest.raises(ValueError, match=r"even head dims, got 5 and 16; leave --plt-triton off"):
        make_codec("int8", Source(dim=5).empty(), None, triton=True)
    assert make_codec("raw", Source().empty(), None, triton=True).name == "raw"


def test_a_warm_up_runs_the_kernels():
    make_codec("int4", Source(layers=2).empty(), make_rotary(16), triton=True).warm_up()
