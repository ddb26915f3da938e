"""The rotary probe against SGLang's own modules, pools that are refused, and agreement of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import nn

from sglang_plt.host.embedding import find_embedding
from sglang_plt.host.pool import UnsupportedPool, pool_rows
from sglang_plt.host.ranks import from_rank_0, make_agree_min
from sglang_plt.host.rotary import find_rotary
from tests.host.vote import vote


@pytest.fixture(autouse=True)
def context():
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def rope(head_dim=64, rotary_dim=None, is_neox=True, scaling=None) -> nn.Module:
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(
        head_dim,
        rotary_dim=rotary_dim or head_dim,
        max_position=512,
        base=10000,
        is_neox_style=is_neox,
        rope_scaling=scaling,
        dtype=torch.float32,
    )


SCALINGS = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


class Embedding(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape, dtype=dtype), requires_grad=False)


def test_finds_the_whole_table_of_an_embedding():
    cpu = torch.device("cpu")
    for name in ("embed_tokens", "wte", "word_embeddings"):
        model = nn.ModuleDict({"model": nn.ModuleDict({name: Embedding(64, 8)}), "lm_head": Embedding(64, 8)})
        found = find_embedding(model, 50, 1, cpu)
        assert found.hidden == 8
        assert found(np.array([3, 49])).shape == (2, 8)
        assert find_embedding(model, 65, 1, cpu) is None  # a part of it
        assert find_embedding(model, 50, 2, cpu) is None
    quantised = nn.ModuleDict({"embed_tokens": Embedding(64, 8, dtype=torch.float8_e4m3fn)})
    assert find_embedding(quantised, 50, 1, cpu) is None
    assert find_embedding(nn.ModuleDict({"a": quantised, "b": quantised}), 50, 1, cpu) is None
    assert find_embedding(nn.ModuleDict({"other": Embedding(64, 8)}), 50, 1, cpu) is None


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [64, 32], ids=["full", "partial"])
def test_understands_the_models_rotary(scaling, is_neox, rotary_dim):
    model = nn.ModuleList([rope(rotary_dim=rotary_dim, is_neox=is_neox, scaling=scaling)])
    rotary = find_rotary(model, 64, torch.float32)
    assert rotary is not None
    assert rotary.rotary_dim == rotary_dim


def test_keys_stay_rotated_where_the_rotary_is_not_understood():
    assert find_rotary(nn.Linear(2, 2), 64, torch.float32) is None
    two = nn.ModuleList([rope(), rope(is_neox=False)])
    assert find_rotary(two, 64, torch.float32) is None
    assert find_rotary(nn.ModuleList([rope()]), 32, torch.float32) is None  # wider than the head

    class Doubled(nn.Module):
        """Claims a table that it does not follow."""

        def __init__(self):
            super().__init__()
            inner = rope()
            self.cos_sin_cache, self.is_neox_style = inner.cos_sin_cache, True

        def forward_native(self, positions, query, key):
            return query, key * 2

    assert find_rotary(nn.ModuleList([Doubled()]), 64, torch.float32) is None


def test_pool_rows_share_the_pools_buffers():
    pool = MHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    rows = pool_rows(pool)
    assert (rows.layout.num_layers, rows.layout.kv_heads, rows.layout.head_dim) == (3, 2, 4)
    assert rows.layout.row_bytes == 3 * 2 * 8 * 2
    rows.keys[1][5] = 7
    assert bool((pool.get_key_buffer(1)[5] == 7).all())


def test_other_pools_are_refused_by_name():
    class MLATokenToKVPool:
        pass

    with pytest.raises(UnsupportedPool, match=r"MLATokenToKVPool.*--plt-cold-bytes 0"):
        pool_rows(MLATokenToKVPool())


def test_no_group_agrees_with_itself():
    assert make_agree_min(None)(7) == 7
    assert from_rank_0(None, lambda: (3, 4), 2) == (3, 4)


def test_two_ranks_agree_on_the_smallest_and_measure_once(tmp_path):
    answers = [tmp_path / "0", tmp_path / "1"]
    torch.multiprocessing.spawn(vote, args=(str(tmp_path / "store"), [str(path) for path in answers]), nprocs=2)
    assert [path.read_text() for path in answers] == ["3 8 (1000000000000000, 0)"] * 2
