"""Rows of reference blocks added to differences: pinned numbers, kernel against reference bit for bit, refusals."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ops.align import kernel, reference


def case(num_rows: int, num_references: int, width: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    own, rows = (
        torch.randn(num_rows, width, generator=generator),
        torch.randn(num_references, width, generator=generator),
    )
    source = torch.randint(-1, num_references, (num_rows,), generator=generator)
    return own, rows, source, torch.rand(num_rows, generator=generator) + 0.5


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.int32)


def test_sums_are_pinned():
    own = torch.tensor([[1.0, -0.0], [2.0, 3.0], [0.5, 0.0]])
    rows = torch.tensor([[10.0, 20.0], [-4.0, 8.0]])
    found = reference.add_rows(own, rows, torch.tensor([-1, 1, 0]), torch.tensor([float("nan"), 0.25, 2.0]))
    assert bits_of(found).tolist() == bits_of(torch.tensor([[1.0, -0.0], [1.0, 5.0], [20.5, 40.0]])).tolist()


@pytest.mark.parametrize("width", [1, 16, 130, 1025])
@pytest.mark.parametrize(("num_rows", "num_references"), [(1, 1), (37, 5), (256, 700), (3, 0), (0, 4)])
def test_kernel_matches_reference(num_rows, num_references, width, device):
    own, rows, source, scale = case(num_rows, num_references, width, num_rows + width)
    out = torch.full((num_rows, width), float("nan"), device=device)
    got = kernel.add_rows(own.to(device), rows.to(device), source.to(device), scale.to(device), out)
    assert got is out
    assert torch.equal(bits_of(got), bits_of(reference.add_rows(own, rows, source, scale)))


def test_columns_of_wider_rows_in_place_and_rows_that_are_not_finite(device):
    own, rows, source, scale = case(40, 9, 200, 3)
    rows[2, 70], own[source == 2, 71] = float("inf"), float("nan")
    want = reference.add_rows(own[:, 64:99], rows[:, 64:99], source, scale)
    whole, wide = own.to(device), rows.to(device)
    got = kernel.add_rows(whole[:, 64:99], wide[:, 64:99], source.to(device), scale.to(device))
    assert torch.equal(bits_of(got), bits_of(want))
    kernel.add_rows(whole[:, 64:99], wide[:, 64:99], source.to(device), scale.to(device), whole[:, 64:99])
    assert torch.equal(bits_of(whole[:, 64:99]), bits_of(want))
    assert torch.equal(bits_of(whole[:, :64]), bits_of(own[:, :64]))
    assert torch.equal(bits_of(whole[:, 99:]), bits_of(own[:, 99:]))


@triton.jit
def shifted_kernel(own_ptr, reference_ptr, source_ptr, scale_ptr, out_ptr, elements, WIDTH: tl.constexpr):
    kernel.add_rows_kernel(
        own_ptr, reference_ptr - elements, source_ptr, scale_ptr, out_ptr, 8, WIDTH, WIDTH, WIDTH, WIDTH, 8, WIDTH
    )


def test_addresses_beyond_two_to_the_31_elements(device):
    """Sources are moved up by as many rows as the pointer of the references is moved down."""
    own, rows, source, scale = (x.to(device) for x in case(8, 4, 16, 5))
    away = 3 * 2**31 // 16
    out = torch.full_like(own, float("nan"))
    moved = torch.where(source < 0, source, source + away)
    shifted_kernel[1,](own, rows, moved, scale, out, away * 16, WIDTH=16, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), reference.add_rows(own, rows, source, scale).cpu())


@pytest.mark.parametrize("add", [kernel.add_rows, reference.add_rows], ids=["kernel", "reference"])
def test_refuses_what_does_not_fit(add, device):
    own, rows, source, scale = (x.to(device) for x in case(4, 3, 8, 1))
    with pytest.raises(ValueError, match=r"got \(4, 8\) and \(3, 7\)"):
        add(own, rows[:, :7], source, scale)
    with pytest.raises(ValueError, match=r"source and scale must be \[4\], got \(3,\) and \(4,\)"):
        add(own, rows, source[:3], scale)
    with pytest.raises(TypeError, match=r"reference must be torch\.float32, got torch\.float64"):
        add(own, rows.double(), source, scale)


def test_kernel_refuses_components_that_lie_apart(device):
    own, rows, source, scale = (x.to(device) for x in case(4, 3, 8, 1))
    with pytest.raises(ValueError, match="components of own must lie side by side"):
        kernel.add_rows(own.T.contiguous().T, rows, source, scale)
    with pytest.raises(ValueError, match=r"out must be float32 \(4, 8\), got torch\.float32 \(3, 8\)"):
        kernel.add_rows(own, rows, source, scale, own[:3])
