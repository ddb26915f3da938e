"""Formats ``rotated1/1`` to ``rotated8/1``: pinned bytes, levels, error bound, edges, refusals."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_ops.rotated import reference
from triton_ops.rotated.levels import DISTORTION, POSITIVE

DIMS = (1, 2, 5, 64, 80, 96, 128)
"""Least squared error of 2, 4, .. 256 levels over the variance of a normal distribution."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def raw_bytes(x: torch.Tensor) -> str:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


@pytest.mark.parametrize(
    ("bits", "codes"),
    [
        (1, "16"),
        (2, "6d02"),
        (3, "3a57"),
        (4, "e5680a"),
        (5, "8b475601"),
        (6, "172e662a"),
        (7, "ae37515605"),
        (8, "5ddf8865ab"),
    ],
)
def test_bytes_are_pinned(bits, codes):
    # one head row in two overlapping pieces of four; sqrt(55) is 0x476b in float16
    norms, found = reference.encode(torch.tensor([[[1.0, -2.0, 3.0, -4.0, 5.0]]]), bits)
    assert (raw_bytes(norms), raw_bytes(found)) == ("6b47", codes)


def test_a_power_of_two_is_turned_by_hand():
    # signs of draws 0 .. 3 for a piece of four, then sums and differences over 1 and 2, then a half
    signs = reference.signs_of(4)
    a, b, c, d = (value * sign for value, sign in zip((1.0, 2.0, 3.0, 5.0), signs, strict=True))
    expected = torch.tensor([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]) / 2
    assert torch.equal(reference.rotate(torch.tensor([1.0, 2.0, 3.0, 5.0])), expected)


def test_signs_are_pinned():
    draws = "".join("-" if sign < 0 else "+" for sign in reference.signs_of(32))
    assert draws == "-++++--++++-+--++-+++++++-++-+-+"


def test_codes_follow_one_another_in_the_bit_string():
    codes = torch.tensor([[[1, 2, 7]]])
    assert raw_bytes(reference._pack(codes, 3)) == "d101"  # 111 010 001, from the last bit to the first
    assert torch.equal(reference._unpack(reference._pack(codes, 3), 3, 3), codes)


@pytest.mark.parametrize("bits", reference.BITS)
def test_levels_are_the_means_of_their_cells(bits):
    levels = POSITIVE[bits]
    assert len(levels) == 2 ** (bits - 1)
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    for level, (low, high) in zip(levels, pairwise(edges), strict=True):
        mass = (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2))) / 2
        moment = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        assert level == pytest.approx(moment / mass, abs=2e-7)


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_keeps_lengths_and_has_an_inverse(dim):
    x = normal(7, 3, dim)
    turned = reference.rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reference.rotate_back(turned), x, rtol=1e-5, atol=1e-5)
    if dim >= 64:  # one large channel is spread over all of them
        spike = torch.zeros(dim)
        spike[dim - 1] = 1.0
        assert reference.rotate(spike).abs().max() < 0.36


@pytest.mark.parametrize("bits", reference.BITS)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_distortion_is_that_of_the_normal_distribution(dim, bits):
    x = normal(2000, 2, dim) * 3 + 1
    error = reference.decode(*reference.encode(x, bits), bits, dim) - x
    # a sphere has lighter tails than a normal distribution, the less so the more dimensions
    assert 0.9 < float(error.pow(2).sum() / x.pow(2).sum()) / DISTORTION[bits] < 1.01


@pytest.mark.parametrize("bits", reference.BITS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_and_heads_do_not_depend_on_one_another(rows, dim, bits):
    x = normal(rows, 2, dim)
    norms, codes = reference.encode(x, bits)
    assert (norms.shape, norms.dtype) == ((rows, 2), torch.float16)
    assert (codes.shape, codes.dtype) == ((rows, 2, reference.code_bytes(dim, bits)), torch.uint8)
    decoded = reference.decode(norms, codes, bits, dim)
    assert decoded.shape == x.shape
    for row in range(rows):
        one = reference.encode(x[row : row + 1, 1:], bits)
        assert torch.equal(one[0][0, 0], norms[row, 1])
        assert torch.equal(one[1][0, 0], codes[row, 1])
        assert torch.equal(reference.decode(*one, bits, dim)[0, 0], decoded[row, 1])


def check_bound(x: torch.Tensor, bits: int) -> None:
    """Half a gap between the outermost levels, the distance beyond them, plus the fp32 rounding of ``dim`` sums."""
    dim = x.shape[-1]
    norms, codes = reference.encode(x, bits)
    decoded = reference.decode(norms, codes, bits, dim)
    scale = (norms.double() / math.sqrt(dim)).unsqueeze(-1)
    turned = reference.rotate(x).double()
    levels = torch.tensor([0.0, *POSITIVE[bits]], dtype=torch.float64)
    gap = max(float(levels.diff()[1:].max() if bits > 1 else 0.0), 2 * float(levels[1]))
    beyond = turned.abs() - float(levels[-1]) * scale
    bound = torch.maximum(beyond, gap / 2 * scale)
    rounding = turned.norm(dim=-1, keepdim=True) * 1e-5 + 2.0**-120
    assert (torch.where(scale > 0, (reference.rotate(decoded).double() - turned).abs() - bound, 0.0) <= rounding).all()
    assert not decoded[(norms == 0).expand_as(decoded[..., 0])].any()


FLOATS = st.floats(-20000, 20000, width=32)


@given(st.data(), st.sampled_from((1, 2, 5, 6, 8)), st.sampled_from(reference.BITS))
def test_error_is_within_the_bound(data, dim, bits):
    rows = data.draw(st.lists(st.lists(FLOATS, min_size=dim, max_size=dim), min_size=1, max_size=6))
    check_bound(torch.tensor(rows, dtype=torch.float32).unsqueeze(1), bits)


@pytest.mark.parametrize("bits", reference.BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-3, 1.0, 5000.0])
def test_the_bound_holds_at_every_size(size, bits):
    check_bound(normal(20, 2, 64) * size, bits)


def test_the_longest_row_and_the_next():
    assert reference.encode(torch.full((1, 1, 4), 32752.0), 4)[0].item() == 65504.0
    with pytest.raises(reference.NotEncodable, match="at most 65504 long"):
        reference.encode(torch.full((1, 1, 4), 32753.0), 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 65536.0, -1e30])
def test_refuses_values_outside_the_format(bad):
    x = normal(5, 2, 6)
    x[3, 1, 2] = bad
    with pytest.raises(reference.NotEncodable, match="finite and at most 65504 long"):
        reference.encode(x, 4)


def test_refuses_what_it_cannot_encode():
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        reference.encode(normal(2, 1, 6), 9)
    with pytest.raises(ValueError, match=r"dim of at least 1, got \(2, 6\)"):
        reference.encode(normal(2, 6), 4)
    with pytest.raises(ValueError, match=r"dim of at least 1, got \(2, 1, 0\)"):
        reference.encode(normal(2, 1, 0), 4)
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        reference.encode(normal(2, 1, 6).double(), 4)
