"""The CPU scatter kernel against rotation, cast and index copy, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows, RowLayout
from sglang_plt.codec.scatter import Scatter

SLOTS = 40


def pool(dtype: torch.dtype, heads: int, dim: int, v_dim: int) -> PoolRows:
    keys = torch.full((SLOTS, heads, dim), float("nan"), dtype=dtype)
    values = torch.full((SLOTS, heads, v_dim), float("nan"), dtype=dtype)
    return PoolRows(RowLayout(1, heads, dim, v_dim, dtype), (keys,), (values,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(deadline=None, max_examples=25)
@given(
    heads=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (6, 10), (96, 64)]),
    rotary=st.sampled_from([None, True, False]),
    count=st.integers(0, 12),
    scale=st.sampled_from([1.0, 1e-7, 1e5]),
    cut=st.booleans(),
)
def test_kernel_and_torch_write_the_same_bits(dtype, heads, dims, rotary, count, scale, cut):
    generator = torch.Generator().manual_seed(count)
    dim, v_dim = dims
    width = heads * (dim + v_dim)
    rows = torch.randn(count, 2 * width, generator=generator) * scale
    rows = rows[:, width:] if cut else rows[:, width:].contiguous()
    angles = torch.rand(50, dim // 4, generator=generator) * 6
    table = None if rotary is None else Rotary(torch.cat((angles.cos(), angles.sin()), 1), rotary, 2 * (dim // 4))
    slots = torch.randperm(SLOTS, generator=generator)[:count]
    written = []
    for kernels in (True, False):
        target = pool(dtype, heads, dim, v_dim)
        Scatter(target, table, kernels)(0, rows, slots, 3, finite=True)
        written.append([buffer.view(torch.uint8) for buffer in (target.keys[0], target.values[0])])
    for ours, theirs in zip(*written, strict=True):
        assert torch.equal(ours, theirs)
