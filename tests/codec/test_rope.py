"""Rotary: known rotations, inverse, partial rotation, magnitude factors, refusals."""

import pytest
import torch

from sglang_plt.codec import Rotary
from tests.codec.pools import make_rotary


def test_pairs_and_signs_are_pinned():
    # position 1: first pair by cos 0, sin 1 (a quarter turn), second pair by cos 1, sin 0
    table = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
    x, positions = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]]), torch.tensor([1])
    assert Rotary(table, True, 4).apply(x, positions).tolist() == [[[-3.0, 2.0, 1.0, 4.0, 5.0]]]
    assert Rotary(table, False, 4).apply(x, positions).tolist() == [[[-2.0, 1.0, 3.0, 4.0, 5.0]]]


@pytest.mark.parametrize("magnitude", [1.0, 1.3], ids=["plain", "yarn"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [64, 24], ids=["full", "partial"])
def test_undo_inverts_apply(rotary_dim, is_neox, magnitude):
    rotary = make_rotary(rotary_dim, is_neox, magnitude=magnitude)
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.randint(0, 1024, (50,), generator=torch.Generator().manual_seed(1))
    there = rotary.apply(x, positions)
    assert torch.equal(there[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(rotary.undo(there, positions), x, rtol=0, atol=1e-6)


def test_window_is_the_table_of_consecutive_positions():
    rotary = make_rotary()
    assert torch.equal(torch.from_numpy(rotary.window(7, 5)), rotary.cos_sin[7:12])


def test_refuses_bad_tables_and_positions():
    with pytest.raises(TypeError, match=r"float32, got torch\.float16"):
        Rotary(torch.ones(4, 8).half(), True, 8)
    with pytest.raises(ValueError, match=r"\[positions, 8\], got shape \(4, 6\)"):
        Rotary(torch.ones(4, 6), True, 8)
    with pytest.raises(ValueError, match="even and positive, got 3"):
        Rotary(torch.ones(4, 3), True, 3)
    with pytest.raises(ValueError, match="not both zero"):
        Rotary(torch.zeros(4, 8), True, 8)
    with pytest.raises(ValueError, match=r"positions 0\.\.1023, got 1020\.\.1024"):
        make_rotary().check_positions(1020, 5)
