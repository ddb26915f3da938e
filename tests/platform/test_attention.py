"""Attention behind a prefix against SGLang's own, which computes all of it."""

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_plt.platform.attention import _around_extend

ORIGINAL = TorchNativeAttnBackend._run_sdpa_forward_extend
BACKEND = object.__new__(TorchNativeAttnBackend)


def call(function, prefixes: list[int], counts: list[int], heads: tuple[int, int], **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    num_heads, kv_heads = heads
    lengths = [p + c for p, c in zip(prefixes, counts, strict=True)]
    table = torch.randperm(4 * 64, generator=generator)[: 64 * len(lengths)].reshape(len(lengths), 64)
    keys, values = (torch.randn(256, kv_heads, 8, generator=generator) for _ in range(2))
    query = torch.randn(sum(counts), num_heads, 8, generator=generator)
    return function(
        BACKEND,
        query,
        torch.full_like(query, float("nan")),
        keys,
        values,
        table,
        torch.arange(len(lengths)),
        torch.tensor(lengths),
        torch.tensor(prefixes),
        torch.tensor(counts),
        scaling=0.3,
        enable_gqa=num_heads != kv_heads,
        causal=True,
        **options,
    )


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize(
    ("prefixes", "counts"), [([5], [3]), ([0], [7]), ([63], [1]), ([10, 0, 40], [1, 9, 24]), ([0, 0], [4, 5])]
)
def test_same_as_computing_everything(heads, prefixes, counts):
    ours = call(lambda *args, **options: _around_extend(ORIGINAL, *args, **options), prefixes, counts, heads)
    theirs = call(ORIGINAL, prefixes, counts, heads)
    assert torch.allclose(ours, theirs, atol=2e-6)


def test_what_is_not_plain_is_left_to_sglang():
    seen = []

    def original(*args):
        seen.append(args)
        return args[2]

    for options in ({"sliding_window_size": 4}, {"is_cross_attn": True}):
        call(lambda *args, **kwargs: _around_extend(original, *args, **kwargs), [5], [3], (2, 2), **options)
    assert len(seen) == 2
