"""Fused encode and decode of integer groups against their specification, bit for bit."""

from dataclasses import replace

import pytest
import torch

from tests.triton_ops import restore_cases as slow
from tests.triton_ops.restore_cases import Case
from triton_ops.int_groups.blocks import Block
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode
from triton_ops.paged import DTYPES, PagedPool

SHAPES = {
    "llama": Case(dim=128, v_dim=128, rotary=128, bits=4),
    "llama_int8": Case(dim=128, v_dim=128, rotary=128),
    "small": Case(heads=1, bits=4, layers=5),
    "phi3": Case(dim=96, v_dim=96, rotary=96, bits=4, layers=1),
    "gemma": Case(heads=1, dim=256, v_dim=256, rotary=256, bits=4, layers=1),
    "glm_int4": Case(dim=128, v_dim=128, rotary=64, is_neox=False, bits=4, layers=1),
    "glm_int8": Case(dim=128, v_dim=128, rotary=64, is_neox=False, layers=1),
    "partial_neox": Case(dim=80, v_dim=80, rotary=32, bits=4),
    "partial_across_halves": Case(rotary=48, bits=4, layers=1),
    "gptj": Case(rotary=64, is_neox=False, bits=4, layers=1),
    "wide_values": Case(dim=64, v_dim=128, bits=4),
    "keys_stay_rotated": Case(rotary=0, bits=4),
    "mla": Case(heads=1, dim=576, v_dim=0, rotary=0, bits=4, page=64, layers=1),
    "mla_int8": Case(heads=1, dim=576, v_dim=0, rotary=0, layers=1),
    "one_pair": Case(heads=1, dim=2, v_dim=2, rotary=2, bits=4),
    "pages_of_16": Case(page=16, bits=4),
    "pages_of_64_hnd": Case(page=64, layout="hnd", bits=4),
    "pages_of_16_hnd": Case(heads=3, page=16, layout="hnd"),
    **{f"{dtype}".removeprefix("torch."): Case(dtype=dtype, bits=4, layers=1) for dtype in DTYPES},
}
BLOCKS = [(70, 4), (3, 3), (1, 0), (65, 0)]


def pools(case: Case, device: torch.device, seed: int | None) -> tuple[PagedPool, PagedPool | None]:
    pages = -(-300 // case.page)
    values = slow.pool(case, case.v_dim, pages, device, None if seed is None else seed + 1) if case.v_dim else None
    return slow.pool(case, case.dim, pages, device, seed), values


def layout(case: Case, keys: PagedPool, values: PagedPool | None) -> tuple[list[Block], torch.Tensor]:
    """Blocks one behind the other, and a payload of zeros."""
    at, blocks = 0, []
    for size, (rows, exact) in zip(slow.sizes(case, BLOCKS, keys, values), BLOCKS, strict=True):
        blocks.append(Block(at, rows, exact, 0, rows, 7 * len(blocks)))
        at += size
    return blocks, torch.zeros(at, dtype=torch.uint8)


def raw(pool: PagedPool) -> torch.Tensor:
    return torch.stack([slow.as_bytes(view) for view in pool.views]).cpu()


def encoded(case: Case, keys: PagedPool, values: PagedPool | None) -> tuple[list[Block], torch.Tensor, torch.Tensor]:
    """Blocks and their payload by the specification, and the slots of their rows."""
    blocks, payload = layout(case, keys, values)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(5))[: sum(rows for rows, _ in BLOCKS)]
    rotation = slow.rotation_of(case, 200, keys.device)
    at = 0
    for block in blocks:
        slow.encode(payload, block, case, keys, values, slots[at : at + block.num_rows], rotation)
        at += block.num_rows
    return blocks, payload, slots


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_encodes_the_bytes_of_the_reference(case, device):
    keys, values = pools(case, torch.device("cpu"), 1)
    blocks, want, slots = encoded(case, keys, values)
    keys, values = pools(case, device, 1)
    got = torch.zeros_like(want).to(device)
    failed = encode(got, blocks, keys, values, slots.to(device), case.bits, slow.rotation_of(case, 200, device))
    assert failed.tolist() == [0] * len(blocks)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_decodes_the_bits_of_the_reference(case, device):
    blocks, payload, _ = encoded(case, *pools(case, torch.device("cpu"), 1))
    # other positions, and parts of blocks: exact rows only, a part of a group, nothing
    parts = [(2, 69), (1, 2), (0, 0), (64, 65)]
    moved = [replace(block, start=a, stop=b, position=50) for block, (a, b) in zip(blocks, parts, strict=True)]
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(6))[: sum(b - a for a, b in parts)]
    want = pools(case, torch.device("cpu"), None)
    at, rotation = 0, slow.rotation_of(case, 200, torch.device("cpu"))
    for block in moved:
        count = block.stop - block.start
        slow.decode(payload, block, case, *want, slots[at : at + count], rotation)
        at += count
    got = pools(case, device, None)
    decode(payload.to(device), moved, *got, slots.to(device), case.bits, slow.rotation_of(case, 200, device))
    for mine, theirs in zip(got, want, strict=True):
        assert mine is None or torch.equal(raw(mine), raw(theirs))  # rows beside them still NaN


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e6])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_says_which_block_cannot_be_encoded(where, bad, device):
    case = Case(dtype=torch.float32, bits=4)
    keys, values = pools(case, device, 1)
    blocks, payload = layout(case, keys, values)
    slots = torch.arange(sum(rows for rows, _ in BLOCKS), device=device)
    spoiled = keys if where == "keys" else values
    spoiled.views[1][100, 0, 1, 5] = bad  # of the last block
    spoiled.views[1][0, 0, 1, 5] = bad  # of an exact row
    failed = encode(payload.to(device), blocks, keys, values, slots, 4, slow.rotation_of(case, 200, device))
    assert failed.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("page", [1, 16])
def test_addresses_beyond_two_to_the_31_elements(page, device):
    """The pool is a small buffer, its offset moved down so far that the slots are large."""
    case = Case(page=page, bits=4, layers=1)
    keys, values = pools(case, device, 1)
    blocks, payload, slots = encoded(case, *pools(case, torch.device("cpu"), 1))
    rotation = slow.rotation_of(case, 200, device)
    away = 3 * 2**31 // (case.heads * case.dim * page)  # pages
    want, got = pools(case, device, None), pools(case, device, None)
    decode(payload.to(device), blocks, *want, slots.to(device), 4, rotation)
    for pool in (keys, values, *got):
        pool.offsets.sub_(away * pool.strides[0])
    far = slots.to(device) + away * page
    decode(payload.to(device), blocks, *got, far, 4, rotation)
    assert all(torch.equal(raw(mine), raw(theirs)) for mine, theirs in zip(got, want, strict=True))
    again = torch.zeros_like(payload).to(device)
    encode(again, blocks, keys, values, far, 4, rotation)
    assert torch.equal(again.cpu(), payload)


def test_no_blocks_and_no_rows(device):
    case = Case(bits=4)
    keys, values = pools(case, device, None)
    before = raw(keys)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    rotation = slow.rotation_of(case, 200, device)
    payload = torch.zeros(16, dtype=torch.uint8, device=device)
    decode(payload, [], keys, values, nothing, 4, rotation)
    assert encode(payload, [], keys, values, nothing, 4, rotation).tolist() == []
    decode(payload, [Block(0, 0, 0, 0, 0, 0)], keys, values, nothing, 4, rotation)
    assert torch.equal(raw(keys), before)


def test_refuses_what_does_not_fit(device):
    case = Case(bits=4)
    keys, values = pools(case, device, 1)
    rotation = slow.rotation_of(case, 200, device)
    blocks, payload, slots = encoded(case, *pools(case, torch.device("cpu"), 1))
    payload, slots = payload.to(device), slots.to(device)
    with pytest.raises(ValueError, match=r"positions 0\.\.199, got up to 200"):
        decode(payload, [replace(blocks[2], position=200)], keys, values, slots[:1], 4, rotation)
    with pytest.raises(ValueError, match=r"slots must be contiguous int64 \[139\], got torch.int64 \(138,\)"):
        decode(payload, blocks, keys, values, slots[1:], 4, rotation)
    with pytest.raises(ValueError, match="leaves the payload"):
        decode(payload[:-16], blocks, keys, values, slots, 4, rotation)
    with pytest.raises(ValueError, match=r"encoded as a whole, got rows 1\.\.70"):
        encode(payload, [replace(blocks[0], start=1)], keys, values, slots, 4, rotation)
    with pytest.raises(ValueError, match="multiple of 16, got 8"):
        Block(8, 1, 0, 0, 1, 0)
    with pytest.raises(ValueError, match="bits must be 4 or 8, got 3"):
        decode(payload, blocks, keys, values, slots, 3, rotation)
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        PagedPool.nhd([torch.zeros(1, 1, 2, dtype=torch.int32)])
    with pytest.raises(ValueError, match="buffer 1 is not like buffer 0"):
        PagedPool.nhd([torch.zeros(1, 1, 2), torch.zeros(2, 1, 2)])
