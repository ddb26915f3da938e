"""Formats ``int4/1`` and ``int8/1``: pinned bytes, error bound, edges, refusals, scalar conversions bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from triton_ops.int_groups import cpu_scalars as scalars
from triton_ops.int_groups import reference


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def raw_bytes(x: torch.Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def test_value_bytes_are_pinned():
    # one head row, low -2 and step 1: codes 0, 15, 3, 7; channel j beside channel j + 2
    params, codes = reference.encode_values(torch.tensor([[[-2.0, 13.0, 1.0, 5.0]]]), 4)
    assert (raw_bytes(params), raw_bytes(codes)) == ("00c0003c", "307f")
    params, codes = reference.encode_values(torch.tensor([[[-2.0, 253.0, 1.0, 5.0]]]), 8)
    assert (raw_bytes(params), raw_bytes(codes)) == ("00c0003c", "00ff0307")


def test_key_bytes_are_pinned():
    # two rows, two channels: lows -2 and 0.1 rounded down, scales 1 and the next float16 above 0.7 / 15
    params, codes = reference.encode_keys(torch.tensor([[[-2.0, 0.8]], [[13.0, 0.1]]]), 4)
    assert (raw_bytes(params), raw_bytes(codes)) == ("00c0662e003cfa29", "f00f")


@pytest.mark.parametrize("bits", reference.BITS)
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 256])
def test_any_row_range_decodes_alike(rows, bits):
    x = normal(rows, 3, 6)
    params, codes = reference.encode_keys(x, bits)
    assert params.shape == (-(-rows // 64), 2, 3, 6)
    whole = reference.decode_keys(params, codes, bits)
    start = rows // 3
    assert torch.equal(reference.decode_keys(params, codes[start:], bits, start), whole[start:])
    value_params, value_codes = reference.encode_values(x, bits)
    assert reference.decode_values(value_params, value_codes, bits).shape == x.shape


def check_bound(x, decoded, low, scale, bits):
    """Half a stored step, plus the fp32 rounding of the few operations on the way."""
    rounding = (low.double().abs() + (2**bits - 1) * scale.double()) * 2.0**-21 + 2.0**-126
    assert ((decoded.double() - x.double()).abs() <= 0.5 * scale.double() + rounding).all()


FLOATS = st.floats(-65504, 65504, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS, FLOATS), min_size=1, max_size=80), st.sampled_from(reference.BITS))
def test_error_is_at_most_half_a_step(rows, bits):
    x = torch.tensor(rows, dtype=torch.float32).view(-1, 2, 2)
    params, codes = reference.encode_keys(x, bits)
    group = torch.arange(len(x)) // reference.GROUP
    check_bound(x, reference.decode_keys(params, codes, bits), params[group, 0], params[group, 1], bits)
    params, codes = reference.encode_values(x, bits)
    check_bound(x, reference.decode_values(params, codes, bits), params[..., :1], params[..., 1:], bits)


@given(FLOATS, st.sampled_from(reference.BITS))
def test_constant_groups_keep_the_bound(value, bits):
    x = torch.full((3, 1, 2), value)
    params, codes = reference.encode_values(x, bits)
    check_bound(x, reference.decode_values(params, codes, bits), params[..., :1], params[..., 1:], bits)
    if float(torch.tensor(value).half()) == value:
        assert (params[..., 1] == 0).all()
        assert torch.equal(reference.decode_values(params, codes, bits), x + 0.0)


def test_zero_is_stored_as_plus_zero():
    params, _ = reference.encode_values(torch.tensor([[[-0.0, -0.0]]]), 4)
    assert raw_bytes(params) == "00000000"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 65536.0, -1e30])
@pytest.mark.parametrize("encode", [reference.encode_keys, reference.encode_values])
def test_refuses_values_outside_the_format(encode, bad):
    x = normal(5, 2, 6)
    x[3, 1, 2] = bad
    with pytest.raises(reference.NotEncodable, match="finite and at most 65504"):
        encode(x, 4)


def test_refuses_what_it_cannot_encode():
    with pytest.raises(ValueError, match="dim must be even, got 5"):
        reference.encode_keys(normal(2, 1, 5), 4)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        reference.encode_keys(normal(2, 1, 6), 3)
    with pytest.raises(ValueError, match=r"got shape \(2, 6\)"):
        reference.encode_values(normal(2, 6), 4)
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        reference.encode_values(normal(2, 1, 6).double(), 4)


@njit
def convert_all(x, bits, halves, bfloats, floats, lows):
    for i in range(len(x)):
        halves[i] = scalars.float_to_half(x[i])
        bfloats[i] = scalars.float_to_bfloat(x[i])
        if abs(x[i]) <= 65504:
            lows[i] = scalars.half_at_most(x[i])
    for i in range(len(bits)):
        floats[i] = scalars.half_to_float(bits[i])


def test_scalar_conversions_match_torch():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    every_half = bits.view(torch.float16)
    every_half = every_half[every_half.isfinite()]
    between = (every_half.float() + torch.nextafter(every_half, every_half * 0 + 1).float()) / 2  # ties
    patterns = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0))
    anything = patterns.to(torch.int32).view(torch.float32)
    x = torch.cat((every_half.float(), between, anything[anything.isfinite()]))
    halves, bfloats, lows = (np.zeros(len(x), np.uint16) for _ in range(3))
    floats = np.zeros(len(every_half), np.float32)
    convert_all(x.numpy(), every_half.view(torch.int16).numpy().view(np.uint16), halves, bfloats, floats, lows)
    assert torch.equal(torch.from_numpy(floats), every_half.float())
    for got, dtype in ((halves, torch.float16), (bfloats, torch.bfloat16)):
        want = reference.to_pool_dtype(x, dtype).view(torch.int16)
        assert torch.equal(torch.from_numpy(got.view(np.int16)), want)
    inside = x.abs() <= 65504
    want = reference._half_at_most(x[inside]).view(torch.int16)
    assert torch.equal(torch.from_numpy(lows.view(np.int16))[inside], want)
