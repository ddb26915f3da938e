"""Rows of SGLang's pools: latent ones through every codec, float8 ones, and pools that are refused."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_plt.codec import PoolRows, RowLayout, decode_block, encode_block, make_codec
from sglang_plt.host.pool import UnsupportedPool, pool_rows
from tests.codec.correlated import STEP, Source, profile_of
from tests.codec.pools import some_slots

RANK, ROPE, LAYERS = 32, 8, 3


@pytest.fixture(autouse=True)
def context():
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def mla_pool(dtype: torch.dtype, **more) -> MLATokenToKVPool:
    return MLATokenToKVPool(
        size=400,
        page_size=1,
        dtype=dtype,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def test_a_latent_row_is_the_latent_and_then_the_rotated_channels():
    pool = mla_pool(torch.bfloat16)
    rows = pool_rows(pool)
    assert rows.layout == RowLayout(LAYERS, 1, RANK + ROPE, 0, torch.bfloat16)
    assert rows.layout.row_bytes * (pool.size + pool.page_size) == pool.get_kv_size_bytes()
    rows.keys[2][5] = torch.arange(RANK + ROPE)
    assert pool.get_key_buffer(2)[5, 0, RANK:].tolist() == list(range(RANK, RANK + ROPE))
    assert torch.equal(pool.get_value_buffer(2)[5, 0], rows.keys[2][5, 0, :RANK])
    assert all(value.shape == (401, 1, 0) for value in rows.values)


@pytest.mark.parametrize("name", ["raw", "int8", "int4", "fast", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latent_rows_through_a_block(name, dtype):
    source, slots, where = Source(LAYERS, 1, RANK + ROPE, 0, dtype), some_slots(100), some_slots(100, seed=2)
    pool, target = (pool_rows(mla_pool(dtype)) for _ in range(2))
    profile = profile_of(source, name, True) if name in ("fast", "dense") else None
    for buffer, rows in zip(pool.keys, source.rows(100, 1), strict=True):
        buffer[slots] = rows[:, None].to(dtype)
    block = encode_block(make_codec(name, pool, None, profile), 1, slots, 0)
    decode_block(make_codec(name, target, None, profile), 1, block, 0, 100, where, 0)
    step = {"raw": 0.0, "int8": 0.1, "int4": 1.2}.get(name, 2 * STEP)
    for want, got in zip(pool.keys, target.keys, strict=True):
        want, got = want[slots].float(), got[where].float()
        assert torch.equal(got[:4], want[:4])
        assert (got - want).abs().max() <= step + float(torch.finfo(dtype).eps) * want.abs().max()


def mha_pool(dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=400,
        page_size=1,
        dtype=dtype,
        head_num=2,
        head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


@pytest.mark.parametrize("name", ["int8", "fast", "dense"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_rows_through_a_block(name, dtype):
    source, slots = Source(LAYERS, dtype=dtype), some_slots(100)
    pool, target = (pool_rows(mha_pool(dtype)) for _ in range(2))
    profile = profile_of(source, name, True) if name != "int8" else None
    filled = source.pool(source.rows(100, 1), slots, None, 0)
    for to, buffer in zip((*pool.keys, *pool.values), (*filled.keys, *filled.values), strict=True):
        to.view(torch.uint8)[slots] = buffer.view(torch.uint8)[slots]
    block = encode_block(make_codec(name, pool, None, profile), 1, slots, 0)
    decode_block(make_codec(name, target, None, profile), 1, block, 0, 100, slots, 0)
    for want, got in zip((*filled.keys, *filled.values), (*target.keys, *target.values), strict=True):
        want, got = want[slots].float(), got[slots].float()
        assert (got - want).abs().max() <= 2 * STEP + float(torch.finfo(dtype).eps) * want.abs().max()


def test_pools_with_more_than_rows_are_refused(monkeypatch):
    class Other(MHATokenToKVPool):
        pass

    pool = mha_pool(torch.bfloat16)
    assert isinstance(pool_rows(pool), PoolRows)
    monkeypatch.setattr(MHATokenToKVPool, "is_quantized_kv_cache", True)
    with pytest.raises(UnsupportedPool, match=r"MHATokenToKVPool as this one is set up.*--plt-cold-bytes 0"):
        pool_rows(pool)
    with pytest.raises(UnsupportedPool, match=r"KV of a MLATokenToKVPool"):
        pool_rows(mla_pool(torch.bfloat16, use_dsa=True))
    for other in (Other, DSATokenToKVPool):
        with pytest.raises(UnsupportedPool, match=other.__name__):
            pool_rows(object.__new__(other))
