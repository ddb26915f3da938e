"""Rows moved within a pool: the same bits with and without the kernel, and keys where the model would have put them."""

import pytest
import torch

from sglang_plt.codec import PoolRows, Rotary, RowLayout
from sglang_plt.host.mover import RowMover

SLOTS, POSITIONS, LAYERS, HEADS = 64, 128, 2, 2


def make(dtype: torch.dtype, dim: int, is_neox: bool) -> tuple[PoolRows, Rotary]:
    generator = torch.Generator().manual_seed(dim)
    frequencies = 10_000.0 ** -(torch.arange(dim // 4) / (dim // 4))
    angles = torch.outer(torch.arange(POSITIONS), frequencies)
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), 1), is_neox, 2 * (dim // 4))
    buffers = [
        tuple(torch.randn(SLOTS, HEADS, dim, generator=generator).to(dtype) for _ in range(LAYERS)) for _ in range(2)
    ]
    return PoolRows(RowLayout(LAYERS, HEADS, dim, dim, dtype), *buffers), rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dim", [8, 20])
@pytest.mark.parametrize("shift", [0, 3, -5])
@pytest.mark.parametrize("in_place", [True, False])
def test_kernel_and_torch_give_the_same_bits(dtype, is_neox, dim, shift, in_place):
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    source = slots[:9]
    target = source if in_place else slots[9:18]
    pools = []
    for kernels in (True, False):
        pool, rotary = make(dtype, dim, is_neox)
        RowMover(pool, rotary, kernels=kernels).copy(source, target, 7, shift)
        pools.append(pool)
    for ours, theirs in zip((*pools[0].keys, *pools[0].values), (*pools[1].keys, *pools[1].values), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("is_neox", [True, False])
def test_keys_are_those_of_the_new_position(is_neox):
    pool, rotary = make(torch.float32, 16, is_neox)
    plain = [keys[:5].clone() for keys in pool.keys]
    for keys, rows in zip(pool.keys, plain, strict=True):
        keys[:5] = rotary.apply(rows, torch.arange(10, 15))
    RowMover(pool, rotary).copy(torch.arange(5), torch.arange(20, 25), 10, 33)
    for keys, rows in zip(pool.keys, plain, strict=True):
        assert torch.allclose(keys[20:25], rotary.apply(rows, torch.arange(43, 48)), atol=1e-5)
    assert all(torch.equal(values[20:25], values[:5]) for values in pool.values)


def test_float8_moves_too():
    pool, rotary = make(torch.float8_e4m3fn, 8, True)
    RowMover(pool, rotary).copy(torch.arange(4), torch.arange(8, 12), 3, 2)
    assert all(torch.equal(v[8:12].view(torch.uint8), v[:4].view(torch.uint8)) for v in pool.values)


def test_what_lies_outside_the_table_cannot_move():
    mover = RowMover(*make(torch.float32, 8, True))
    assert mover.can_shift(100, 20, 8)
    assert not mover.can_shift(100, 20, 9)
    assert mover.can_shift(10**6, 1, 0)
    assert not RowMover(make(torch.float32, 8, True)[0], None).can_shift(0, 1, 1)


def test_deviation_is_a_share():
    pool, rotary = make(torch.float32, 8, True)
    for buffer in (*pool.keys, *pool.values):
        buffer[10:14] = buffer[:4] * 1.1
    mover = RowMover(pool, rotary)
    assert mover.deviation(torch.arange(10, 14), torch.arange(4)) == pytest.approx(0.01, rel=1e-3)
    assert mover.deviation(torch.arange(4), torch.arange(4)) == 0
