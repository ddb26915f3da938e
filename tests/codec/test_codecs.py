"""The codecs over pools: torch path and CPU kernels byte for byte, round trips, ranges, refusals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from sglang_plt.codec import CODECS, EncodeError, IntGroups, PoolRows, RowLayout, make_codec
from tests.codec.pools import NAN, NUM_SLOTS, all_bytes, make_pool, make_rotary, some_slots

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = {  # dtype, bits, heads, head_dim, v_head_dim, rotary
    "smollm2_f32": (F32, 4, 3, 64, 64, make_rotary(64)),
    "smollm2_bf16": (BF16, 4, 3, 64, 64, make_rotary(64)),
    "smollm2_f16_int8": (F16, 8, 3, 64, 64, make_rotary(64)),
    "partial_gptj_yarn": (BF16, 8, 1, 128, 128, make_rotary(96, is_neox=False, magnitude=1.3)),
    "partial_neox_dims_differ": (F16, 4, 3, 80, 40, make_rotary(32)),
    "partial_gptj_dim_6": (F32, 4, 3, 6, 6, make_rotary(4, is_neox=False)),
    "no_rotary_odd_dim_int8": (F32, 8, 1, 5, 3, None),
}


def encode(codec, slots, position, num_exact):
    payload = np.full(codec.payload_limit(len(slots), num_exact), 0xA5, np.uint8)
    codec.encode(slots, position, num_exact, payload)
    return payload


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_match_the_torch_path(shape):
    dtype, bits, heads, dim, v_dim, rotary = shape
    pool = make_pool(dtype, heads, dim, v_dim)
    for num_rows, num_exact in ((0, 0), (1, 0), (1, 1), (5, 4), (64, 0), (65, 0), (256, 3)):
        slots, position = some_slots(num_rows), 0 if num_exact else 300
        fast, slow = IntGroups(pool, rotary, bits), IntGroups(pool, rotary, bits, kernels=False)
        payload = encode(fast, slots, position, num_exact)
        assert np.array_equal(payload, encode(slow, slots, position, num_exact))
        for start, stop in ((0, num_rows), (num_rows // 2, num_rows), (min(2, num_rows), num_rows - num_rows // 3)):
            target, twin = (make_pool(dtype, heads, dim, v_dim, fill=NAN) for _ in range(2))
            where = some_slots(max(stop - start, 0), seed=2)
            for to, kernels in ((target, True), (twin, False)):
                codec = IntGroups(to, rotary, bits, kernels=kernels)
                codec.decode(payload, num_rows, num_exact, start, start + len(where), where, 500)
            assert torch.equal(all_bytes(target), all_bytes(twin))
            for buffer in target.keys + target.values:  # these rows and no others
                assert buffer[where].isfinite().all()
                assert buffer.isnan().all(-1).all(-1).sum() == NUM_SLOTS - len(where)


@pytest.mark.parametrize(("bits", "largest"), [(4, 1.0), (8, 0.06)])
def test_rows_come_back_close_and_exact_rows_bit_for_bit(bits, largest):
    pool, target, rotary = make_pool(), make_pool(fill=NAN), make_rotary()
    slots, where = some_slots(200), some_slots(200, seed=2)
    payload = encode(IntGroups(pool, rotary, bits), slots, 0, 4)
    IntGroups(target, rotary, bits).decode(payload, 200, 4, 0, 200, where, 0)
    for got, want in zip(target.keys + target.values, pool.keys + pool.values, strict=True):
        assert torch.equal(got[where[:4]], want[slots[:4]])
        assert (got[where] - want[slots]).abs().max() < largest


def test_keys_follow_their_rows_to_another_position():
    rotary, slots = make_rotary(), some_slots(70)
    pool, moved, target = make_pool(), make_pool(), make_pool(fill=NAN)
    bare = pool.keys[0][slots]
    pool.keys[0][slots] = rotary.apply(bare, torch.arange(100, 170))
    moved.keys[0][slots] = rotary.apply(bare, torch.arange(600, 670))
    payload = encode(make_codec("int8", pool, rotary), slots, 100, 0)
    make_codec("int8", target, rotary).decode(payload, 70, 0, 0, 70, slots, 600)
    assert (target.keys[0][slots] - moved.keys[0][slots]).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float8_e4m3fn], ids=str)
def test_raw_is_bit_exact(dtype):
    pool, target = make_pool(dtype, v_dim=40), make_pool(dtype, v_dim=40, fill=0.0)
    slots, where = some_slots(100), some_slots(60, seed=2)
    payload = encode(make_codec("raw", pool, None), slots, 7, 0)
    make_codec("raw", target, None).decode(payload, 100, 0, 20, 80, where, 7)
    for got, want in zip(target.keys + target.values, pool.keys + pool.values, strict=True):
        assert torch.equal(got.view(torch.uint8)[where], want.view(torch.uint8)[slots[20:80]])
        assert int((got.view(torch.uint8).flatten(1) != 0).any(1).sum()) == 60


def test_raw_torch_path_gives_the_same_bytes():
    pool, slots = make_pool(BF16, v_dim=40), some_slots(30)
    fast, slow = make_codec("raw", pool, None), make_codec("raw", pool, None)
    slow._on_cpu = False
    payload = encode(fast, slots, 0, 0)
    assert np.array_equal(payload, encode(slow, slots, 0, 0))
    targets = [make_pool(BF16, v_dim=40, fill=NAN) for _ in range(2)]
    for target, on_cpu in zip(targets, (True, False), strict=True):
        codec = make_codec("raw", target, None)
        codec._on_cpu = on_cpu
        codec.decode(payload, 30, 0, 5, 25, some_slots(20, seed=2), 0)
    assert torch.equal(*(all_bytes(target) for target in targets))


@pytest.mark.parametrize("name", CODECS)
def test_gpu_pool_gives_the_cpu_bytes(name, device):
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    slots, rotary = some_slots(100), make_rotary()
    payload = encode(make_codec(name, make_pool(BF16), rotary), slots, 0, 4)
    assert np.array_equal(payload, encode(make_codec(name, make_pool(BF16, device=device), rotary), slots, 0, 4))
    targets = make_pool(BF16, fill=NAN), make_pool(BF16, fill=NAN, device=device)
    for target in targets:
        make_codec(name, target, rotary).decode(payload, 100, 4, 0, 100, slots, 0)
    assert torch.equal(*(all_bytes(target) for target in targets))


@pytest.mark.parametrize(
    ("dtype", "where", "value"),
    [(F32, "keys", NAN), (F32, "values", 1e5), (BF16, "values", NAN), (BF16, "keys", -float("inf"))],
)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_values_outside_the_format_are_refused(dtype, where, value, kernels):
    pool, slots = make_pool(dtype), some_slots(70)
    getattr(pool, where)[1][slots[66], 1, 9] = value
    codec = IntGroups(pool, make_rotary(), 4, kernels=kernels)
    with pytest.raises(EncodeError, match="codec int4: layer 1"):
        encode(codec, slots, 10, 0)
    getattr(pool, where)[1][slots[66], 1, 9] = 0.0
    getattr(pool, where)[1][slots[0], 1, 9] = value
    encode(codec, slots, 3, 1)  # an exact row may hold anything


def test_float16_saturates_instead_of_overflowing():
    pool, slots = make_pool(F16), some_slots(70)
    pool.values[0][slots] = 65504.0
    pool.values[0][slots, :, 0] = -65504.0
    for kernels in (True, False):
        target = make_pool(F16, fill=NAN)
        payload = encode(IntGroups(pool, make_rotary(), 8, kernels=kernels), slots, 10, 0)
        IntGroups(target, make_rotary(), 8, kernels=kernels).decode(payload, 70, 0, 0, 70, slots, 10)
        assert torch.equal(target.values[0][slots], pool.values[0][slots])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("name", "largest"), [("int4", 0.5), ("int8", 0.03)])
def test_float8_pools(dtype, name, largest):
    pool, target, rotary = make_pool(dtype), make_pool(dtype, fill=NAN), make_rotary()
    slots, where = some_slots(100), some_slots(100, seed=2)
    pool.values[1][slots[50]] = torch.finfo(dtype).max
    payload = encode(make_codec(name, pool, rotary), slots, 0, 4)
    make_codec(name, target, rotary).decode(payload, 100, 4, 0, 100, where, 0)
    for got, want in zip(target.keys + target.values, pool.keys + pool.values, strict=True):
        assert torch.equal(got[where[:4]].view(torch.uint8), want[slots[:4]].view(torch.uint8))
        got, want = got[where].float(), want[slots].float()
        spacing = want.abs().clamp_min(0.01) * torch.finfo(dtype).eps
        assert ((got - want).abs() <= 3 * largest + spacing).all()
        assert (got - want).abs().mean() <= largest
    assert (target.values[1][where[50]].float() == torch.finfo(dtype).max).all()
    with pytest.raises(EncodeError, match=f"codec {name}: layer 0"):
        encode(make_codec(name, make_pool(dtype, fill=NAN), rotary), slots, 9, 0)


def test_threads_share_a_codec():
    pool, slots = make_pool(), some_slots(200)
    codec = make_codec("int4", pool, make_rotary())
    want = encode(codec, slots, 10, 0)
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: encode(codec, slots, 10, 0), range(16)):
            assert np.array_equal(got, want)


def test_unaligned_and_read_only_payloads():
    pool, target, twin, slots = make_pool(), make_pool(fill=NAN), make_pool(fill=NAN), some_slots(20)
    for name in CODECS:
        codec = make_codec(name, pool, make_rotary())
        payload = encode(codec, slots, 10, 0)
        room = np.empty(len(payload) + 1, np.uint8)
        codec.encode(slots, 10, 0, room[1:])
        assert np.array_equal(room[1:], payload)
        room.flags.writeable = False
        make_codec(name, target, make_rotary()).decode(room[1:], 20, 0, 0, 20, slots, 10)
        make_codec(name, twin, make_rotary()).decode(payload, 20, 0, 0, 20, slots, 10)
        assert torch.equal(all_bytes(target), all_bytes(twin))


def test_payload_sizes_are_pinned():
    # SmolLM2-135M in bfloat16; a fresh pool is not needed, only its layout
    layout = RowLayout(30, 3, 64, 64, BF16)
    buffers = tuple(torch.zeros(1, 3, 64, dtype=BF16) for _ in range(30))
    pool = PoolRows(layout, buffers, buffers)
    sizes = {name: make_codec(name, pool, None).payload_limit(256, 4) for name in CODECS}
    assert sizes == {"raw": 5898240, "int8": 3178080, "int4": 1726560}


@pytest.mark.parametrize("name", CODECS)
def test_warm_up_leaves_the_pool_alone(name):
    pool = make_pool()
    before = all_bytes(pool)
    make_codec(name, pool, make_rotary()).warm_up()
    assert torch.equal(all_bytes(pool), before)


def test_refuses_pools_and_names_it_cannot_serve():
    with pytest.raises(ValueError, match="unknown codec 'zip'; choose one of raw, int8, int4"):
        make_codec("zip", make_pool(), None)
    with pytest.raises(ValueError, match=r"codec int4: a torch\.uint8 pool is not supported; use codec raw"):
        make_codec("int4", make_pool(torch.uint8, fill=0.0), None)
    with pytest.raises(ValueError, match="head dims must be even, got 5 and 4; use codec int8"):
        make_codec("int4", make_pool(dim=5, v_dim=4), None)
    with pytest.raises(ValueError, match="rotary_dim 64 exceeds head_dim 6"):
        make_codec("int8", make_pool(dim=6), make_rotary())
    pool = make_pool()
    with pytest.raises(ValueError, match=r"pool\.keys\[1\] must be contiguous"):
        make_codec("raw", PoolRows(pool.layout, (pool.keys[0], pool.keys[1][:, :2]), pool.values), None)


@pytest.mark.parametrize("name", CODECS)
def test_refuses_bad_arguments_before_it_writes(name):
    pool, slots = make_pool(), some_slots(20)
    codec, before = make_codec(name, pool, make_rotary()), all_bytes(pool)
    payload = encode(codec, slots, 10, 0)
    for bad, message in (
        (dict(slots=slots + NUM_SLOTS - 1), r"slots must be in 0\.\.399"),
        (dict(slots=slots - NUM_SLOTS), r"slots must be in 0\.\.399"),
        (dict(slots=slots.int()), r"slots must be int64 \[n\], got torch\.int32"),
        (dict(slots=slots[:19]), r"rows 0\.\.20 need 20 slots, got 19"),
        (dict(start=5, stop=4, slots=slots[:0]), r"need 0 <= start <= stop <= 20 rows, got 5\.\.4"),
        (dict(stop=21), r"got 0\.\.21"),
        (dict(position=-1), "position must not be negative, got -1"),
        (dict(num_exact=5), r"num_exact must be in 0\.\.4, got 5"),
        (dict(payload=payload[:-1]), "payload must be contiguous uint8"),
    ):
        arguments = dict(payload=payload, num_rows=20, num_exact=0, start=0, stop=20, slots=slots, position=10) | bad
        with pytest.raises(ValueError, match=message):
            codec.decode(**arguments)
    if name != "raw":
        with pytest.raises(ValueError, match=r"positions 0\.\.1023, got 1010\.\.1029"):
            codec.decode(payload, 20, 0, 0, 20, slots, 1010)
    assert torch.equal(all_bytes(pool), before)
