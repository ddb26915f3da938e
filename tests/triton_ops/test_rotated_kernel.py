"""Fused decoder of rotated codes against its specification, bit for bit."""

import pytest
import torch

from tests.triton_ops import restore_cases as slow
from tests.triton_ops.restore_cases import Case
from triton_ops import rope
from triton_ops.paged import DTYPES, PagedPool
from triton_ops.paged.reference import to_pool
from triton_ops.rotated import reference
from triton_ops.rotated.kernel import decode

CASES = {
    "llama": Case(dim=128, rotary=128),
    "small": Case(heads=3, dim=64, rotary=64, layers=3),
    "phi3": Case(dim=96, rotary=96),
    "phi2": Case(dim=80, rotary=32),
    "gemma": Case(heads=1, dim=256, rotary=256, layers=1),
    "glm": Case(dim=128, rotary=64, is_neox=False),
    "gptj_in_two_pieces": Case(dim=48, rotary=48, is_neox=False),
    "partial": Case(dim=64, rotary=32),
    "partial_across_halves": Case(dim=64, rotary=48),
    "mla": Case(heads=1, dim=576, rotary=0, layers=1, page=64),
    "values": Case(dim=16, rotary=0),
    "pages_hnd": Case(page=16, layout="hnd"),
    **{f"{dtype}".removeprefix("torch."): Case(dtype=dtype, layers=1) for dtype in DTYPES},
}
POSITION = 9


def encoded(case: Case, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Norms, codes and widths, all of 1 to 8; a row of zeros among the rows."""
    generator = torch.Generator().manual_seed(num_rows)
    planes = case.layers * case.heads
    widths = [5 * i % 8 + 1 for i in range(planes)]
    rows = torch.randn(planes, num_rows, 1, case.dim, generator=generator) * 4
    rows[:, num_rows // 2 : num_rows // 2 + 1] = 0
    parts = [reference.encode(x, width) for x, width in zip(rows, widths, strict=True)]
    norms = torch.stack([norm.flatten() for norm, _ in parts]).view(case.layers, case.heads, num_rows)
    return norms, torch.cat([codes.flatten() for _, codes in parts]), widths


def expected(
    case: Case, norms: torch.Tensor, codes: torch.Tensor, widths: list[int], pool: PagedPool, slots: torch.Tensor
) -> None:
    turn = slow.rotation_of(case, 300, torch.device("cpu"))
    positions, at = torch.arange(len(slots)) + POSITION, 0
    for layer in range(case.layers):
        heads = []
        for head in range(case.heads):
            width = widths[layer * case.heads + head]
            size = len(slots) * reference.code_bytes(case.dim, width)
            part = codes[at : at + size].view(len(slots), 1, -1 if len(slots) else 1)
            heads.append(reference.decode(norms[layer, head, :, None], part, width, case.dim))
            at += size
        rows = torch.cat(heads, 1)
        rows = rows if turn is None else rope.apply(turn, rows, positions)
        pool.scatter(layer, slots, to_pool(rows, case.dtype))


def assert_same(got: PagedPool, want: PagedPool) -> None:
    for mine, theirs in zip(got.views, want.views, strict=True):
        assert torch.equal(slow.as_bytes(mine).cpu(), slow.as_bytes(theirs))


def new_pool(case: Case, device: torch.device) -> PagedPool:
    return slow.pool(case, case.dim, 192 // case.page, device, None)


@pytest.mark.parametrize("num_rows", [1, 67])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decodes_the_bits_of_the_reference(case, num_rows, device):
    norms, codes, widths = encoded(case, num_rows)
    slots = torch.randperm(192, generator=torch.Generator().manual_seed(6))[:num_rows]
    want, got = new_pool(case, torch.device("cpu")), new_pool(case, device)
    expected(case, norms, codes, widths, want, slots)
    turn = slow.rotation_of(case, 300, device)
    decode(norms.to(device), codes.to(device), widths, got, slots.to(device), POSITION, turn)
    assert_same(got, want)


@pytest.mark.parametrize("width", reference.BITS)
def test_every_width(width, device):
    case = Case(heads=1, layers=1, rotary=0)
    norms, codes = reference.encode(torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(width)), width)
    want, got = new_pool(case, torch.device("cpu")), new_pool(case, device)
    slots = torch.arange(5)
    expected(case, norms.view(1, 1, 5), codes.flatten(), [width], want, slots)
    decode(norms.view(1, 1, 5).to(device), codes.flatten().to(device), [width], got, slots.to(device), POSITION)
    assert_same(got, want)


def test_no_rows_and_addresses_beyond_two_to_the_31_elements(device):
    """The pool is a small buffer, its offset moved down so far that the slots are large."""
    case = Case(page=16)
    norms, codes, widths = (x if isinstance(x, list) else x.to(device) for x in encoded(case, 20))
    slots = torch.arange(3, 23, device=device)
    want, got = new_pool(case, device), new_pool(case, device)
    decode(norms[:, :, :0], codes[:0], widths, got, slots[:0], 0)
    assert_same(got, new_pool(case, torch.device("cpu")))
    decode(norms, codes, widths, want, slots, 0)
    away = 3 * 2**31 // (case.heads * case.dim * case.page)  # pages
    got.offsets.sub_(away * got.strides[0])
    decode(norms, codes, widths, got, slots + away * case.page, 0)
    assert_same(got, want)


def test_refuses_what_does_not_fit(device):
    case = Case()
    norms, codes, widths = (x if isinstance(x, list) else x.to(device) for x in encoded(case, 4))
    pool, slots = new_pool(case, device), torch.arange(4, device=device)
    with pytest.raises(ValueError, match=r"widths must be 4 numbers of 1 to 8, got \[1, 6, 3, 9\]"):
        decode(norms, codes, [*widths[:3], 9], pool, slots, 0)
    with pytest.raises(ValueError, match=r"codes must be uint8 \[\d+\], got torch.uint8"):
        decode(norms, codes[1:], widths, pool, slots, 0)
    with pytest.raises(ValueError, match="norms must be float16"):
        decode(norms.float(), codes, widths, pool, slots, 0)
    with pytest.raises(ValueError, match=r"a table of 6 positions .* rows up to position 6"):
        decode(norms, codes, widths, pool, slots, 3, slow.rotation_of(case, 6, device))
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        decode(norms, codes, widths, PagedPool.nhd([torch.zeros(4, 2, 24, device=device)] * 2), slots, 0)
