"""What a token costs: the work by hand, and times that are those of the machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_plt.host import rates
from sglang_plt.host.rates import measure_costs, model_flops

SMALL = {"hidden_size": 8, "num_attention_heads": 4, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("more", "inner", "kv_heads", "head_dim"),
    [
        ({}, 32, 4, 2),
        ({"intermediate_size": 20, "num_key_value_heads": 2, "head_dim": 5}, 20, 2, 5),
        ({"intermediate_size": 20, "num_experts_per_tok": 2}, 40, 4, 2),
        (
            {
                "intermediate_size": 20,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 6,
                "shared_expert_intermediate_size": 7,
            },
            25,
            4,
            2,
        ),
    ],
    ids=["fewest_fields", "grouped_heads", "experts", "shared_expert"],
)
def test_work_of_a_token(more, inner, kv_heads, head_dim):
    weights, attention = model_flops(SimpleNamespace(**SMALL, **more))
    queries_and_output, keys_and_values = 2 * 8 * 4 * head_dim, 2 * 8 * kv_heads * head_dim
    assert weights == 3 * 2 * (queries_and_output + keys_and_values + 3 * 8 * inner)
    assert attention == 3 * (2 + 2) * 4 * head_dim * 1024


class NotingCodec:
    """Notes what it is asked; rows must be zeros by then."""

    def __init__(self, pool: MHATokenToKVPool):
        self.pool, self.decoded = pool, 0

    def encode(self, slots, position):
        assert position == 0
        assert not self.pool.get_key_buffer(0)[slots].isnan().any()
        self.slots = slots
        return b""

    def decode(self, data, start, stop, slots, position):
        assert (start, position) == (0, 0)
        assert torch.equal(slots, self.slots)
        self.decoded = stop


@pytest.mark.parametrize(
    ("size", "page_size", "context", "rows"), [(1024, 16, 4096, 256), (64, 1, 4096, 64), (512, 1, 100, 100)]
)
def test_costs(monkeypatch, size, page_size, context, rows):
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=page_size))
    pool = MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=4,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    pool.get_key_buffer(0)[:] = float("nan")
    codec = NotingCodec(pool)
    config = SimpleNamespace(**SMALL, max_position_embeddings=context)
    monkeypatch.setattr(rates, "matmul_rate", lambda device, dtype: 1e6)
    costs = measure_costs(config, 2, torch.float32, pool, codec)
    weights, attention = model_flops(config)
    assert costs[:2] == (weights * 1000 // 2, attention * 1000 // 2)
    assert codec.decoded == rows
    assert int(codec.slots[0]) == page_size
    assert costs.restore_ns >= 1
    assert pool.get_key_buffer(0)[0].isnan().all(), "the padding is no slot"
    assert measure_costs(config, 1, torch.float32, pool, None).restore_ns == 0


def test_a_matrix_product_has_a_rate():
    assert 1e6 < rates.matmul_rate(torch.device("cpu"), torch.float32) < 1e16
