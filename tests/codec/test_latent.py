"""Rows without values, as MLA keeps them: one latent a token, its rotated channels stored as they are."""

import numpy as np
import pytest
import torch

from sglang_plt.codec import BlockDamaged, PoolRows, RowLayout, decode_block, encode_block, make_codec
from tests.codec.correlated import STEP, Source, profile_of
from tests.codec.pools import NAN, all_bytes, make_rotary, some_slots

SOURCE = Source(layers=3, heads=1, dim=40, v_dim=0)
NAMES = ("raw", "int8", "int4", "fast", "dense")


def codec_of(name: str, pool: PoolRows, rotary=None):
    source = Source(3, 1, 40, 0, pool.layout.dtype)
    return make_codec(name, pool, rotary, profile_of(source, name, True) if name in ("fast", "dense") else None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_come_back(name, dtype):
    source, slots = Source(3, 1, 40, 0, dtype), some_slots(150)
    pool, target = source.pool(source.rows(150, 1), slots, None, 0), source.empty()
    block = encode_block(codec_of(name, pool), 5, slots, 0)
    decode_block(codec_of(name, target), 5, block, 0, 150, slots, 0)
    step = {"raw": 0, "int8": 0.1, "int4": 1.2, "fast": 2 * STEP, "dense": 2 * STEP}[name]
    for want, got in zip(pool.keys, target.keys, strict=True):
        assert torch.equal(got[slots[:4]].float(), want[slots[:4]].float())
        want, got = want[slots].float(), got[slots].float()
        assert (got - want).abs().max() <= step + float(torch.finfo(dtype).eps) * want.abs().max()
    assert all(int(x.float().isnan().flatten(1).all(1).sum()) == len(x) - 150 for x in target.keys)
    if name in ("fast", "dense"):
        assert len(block) < 0.65 * len(encode_block(make_codec("int8", pool, None), 5, slots, 0))


@pytest.mark.parametrize("name", NAMES)
def test_latents_serve_their_own_position_only(name):
    slots = some_slots(20)
    pool = SOURCE.pool(SOURCE.rows(20, 1), slots, None, 0)
    block = encode_block(codec_of(name, pool), 5, slots, 50)
    before = all_bytes(pool)
    with pytest.raises(BlockDamaged, match=r"^position: keys are stored rotated at 50, asked for 51"):
        decode_block(codec_of(name, pool), 5, block, 0, 20, slots, 51)
    assert torch.equal(all_bytes(pool), before)


@pytest.mark.parametrize("name", ["int8", "fast"])
def test_a_rotary_for_latents_is_refused(name):
    with pytest.raises(ValueError, match="latent rows are stored with their rotated channels as they are"):
        codec_of(name, SOURCE.empty(), make_rotary(8))


def test_int8_has_no_value_sections():
    rows = torch.tensor([[[0.0, 255.0]], [[255.0, 0.0]]])
    pool = PoolRows(RowLayout(1, 1, 2, 0, torch.float32), (rows,), (torch.empty(2, 1, 0),))
    codec = make_codec("int8", pool, None)
    payload = np.empty(codec.payload_limit(2, 0), np.uint8)
    codec.encode(torch.tensor([0, 1]), 9, 0, payload)
    assert payload.tobytes().hex() == "00000000" "003c003c" "00ffff00" "00000000"  # fmt: skip


def test_warm_up():
    for name in NAMES:
        pool = SOURCE.empty(fill=NAN)
        codec_of(name, pool).warm_up()
        assert pool.keys[0].isnan().all()
