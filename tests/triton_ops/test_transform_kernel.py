"""Restore of a unit against its specification: whole numbers, so that sums in any order are the same bits."""

import pytest
import torch

from tests.triton_ops import restore_cases as slow
from tests.triton_ops.restore_cases import Case
from triton_ops.paged import PagedPool
from triton_ops.transform.kernel import restore_unit
from triton_ops.transform.reference import Unit, scatter, synthesise

CASES = {
    "llama": Case(dim=128, v_dim=128, rotary=128),
    "small_three_layers": Case(layers=4),
    "odd_heads": Case(heads=3, dim=32, v_dim=16, rotary=32),
    "gptj": Case(is_neox=False),
    "partial": Case(rotary=32),
    "partial_across_halves": Case(rotary=48),
    "odd_half": Case(dim=80, v_dim=80, rotary=32),
    "latent": Case(heads=1, dim=576, v_dim=0, rotary=0, page=64),
    "rotated": Case(rotary=0, dtype=torch.float32),
    "hnd_float16": Case(layout="hnd", page=16, dtype=torch.float16),
}


def whole(*shape: int, largest: int, seed: int) -> torch.Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def pools(case: Case, device: torch.device) -> list[PagedPool | None]:
    """Keys and values of NaN."""
    pages = 128 // case.page
    return [slow.pool(case, dim, pages, device, None) if dim else None for dim in (case.dim, case.v_dim)]


def assert_same(got: list[PagedPool | None], want: list[PagedPool | None]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine.views if mine else (), theirs.views if theirs else (), strict=True):
            assert torch.equal(slow.as_bytes(a).cpu(), slow.as_bytes(b).cpu())


@pytest.mark.parametrize("num_rows", [1, 65])
@pytest.mark.parametrize("predicted", [True, False], ids=["predicted", "alone"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_restores_the_bits_of_the_reference(case, predicted, num_rows, device):
    layer_width = case.heads * (case.dim + case.v_dim)
    layers = case.layers - 1
    width = layers * layer_width
    unit = Unit(
        whole(48, width, largest=3, seed=1),
        whole(layer_width, width, largest=2, seed=2) if predicted else None,
        whole(width, largest=100, seed=3),
    )
    components, below = whole(num_rows, 48, largest=9, seed=4), whole(num_rows, layer_width, largest=9, seed=5)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(6))[:num_rows]
    want, got = (pools(case, place) for place in (torch.device("cpu"), device))
    row = synthesise(components, 0.5, below if predicted else None, unit)
    scatter(row, 1, *want, slots, 7, slow.rotation_of(case, 80, torch.device("cpu")))
    kept = torch.full((num_rows, width), float("nan"), device=device)
    moved = Unit(*(part if part is None else part.to(device) for part in (unit.basis, unit.weights, unit.bias)))
    restore_unit(
        components.to(device), 0.5, below.to(device) if predicted else None, moved, 1, *got, slots.to(device), 7,
        slow.rotation_of(case, 80, device), kept,
    )  # fmt: skip
    assert torch.equal(kept.cpu(), row)
    assert_same(got, want)


def test_no_rows_and_addresses_beyond_two_to_the_31_elements(device):
    """The pool is a small buffer, its offset moved down so far that the slots are large."""
    case = Case(page=16)
    layer_width = 2 * case.heads * case.dim
    unit = Unit(whole(16, layer_width, largest=3, seed=1).to(device), None, torch.zeros(layer_width, device=device))
    components, slots = whole(5, 16, largest=9, seed=2).to(device), torch.arange(5, 10, device=device)
    want, got = pools(case, device), pools(case, device)
    turn = slow.rotation_of(case, 50, device)
    restore_unit(components[:0], 1.0, None, unit, 0, *got, slots[:0], 0, turn)
    assert_same(got, want)
    restore_unit(components, 1.0, None, unit, 0, *want, slots, 0, turn)
    away = 3 * 2**31 // (case.heads * case.dim * case.page)  # pages
    for pool in got:
        pool.offsets.sub_(away * pool.strides[0])
    restore_unit(components, 1.0, None, unit, 0, *got, slots + away * case.page, 0, turn)
    assert_same(got, want)


def test_refuses_what_does_not_fit(device):
    case = Case()
    keys, values = (slow.pool(case, 64, 8, device, None) for _ in range(2))
    unit = Unit(torch.zeros(16, 256, device=device), None, torch.zeros(256, device=device))
    slots = torch.arange(3, device=device)
    turn = slow.rotation_of(case, 50, device)
    with pytest.raises(ValueError, match=r"components must be contiguous float32 \(3, 16\), got \(3, 15\)"):
        restore_unit(torch.zeros(3, 15, device=device), 1.0, None, unit, 0, keys, values, slots, 0, turn)
    with pytest.raises(ValueError, match="the table has 50 positions, got 50"):
        restore_unit(torch.zeros(3, 16, device=device), 1.0, None, unit, 0, keys, values, slots, 48, turn)
    with pytest.raises(TypeError, match=r"basis must be float32, got torch\.float64"):
        Unit(torch.zeros(16, 256).double(), None, torch.zeros(256))
