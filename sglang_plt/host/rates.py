"""What a token costs on this machine, measured when the server starts: before it serves, so without the model itself.

The time of a prefill is the work that the model's shape asks for, at the rate of a matrix product of its dtype on its
device: an estimate that leaves out norms, communication and what small batches lose. The time of a restore is measured
with the codec. Policies need the ratios, not the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from sglang_plt.host.pool import pool_rows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

_ROUNDS = 5
_RESTORED_TOKENS = 256
_ATTENTION_STEP = 1024


class Costs(NamedTuple):
    """Nanoseconds, the same on all ranks.

    Attributes:
        prefill_ns: to compute a token without attention to those before it.
        attention_ns: what every 1024 tokens before it add.
        restore_ns: to decode a token; 0 without a codec.
    """

    prefill_ns: int
    attention_ns: int
    restore_ns: int


class BlockCodec(Protocol):
    """Encodes and decodes rows of the pool by slot."""

    def encode(self, slots: torch.Tensor, position: int) -> Any: ...

    def decode(self, data: Any, start: int, stop: int, slots: torch.Tensor, position: int) -> None: ...


def measure_costs(config: Any, tp_size: int, dtype: torch.dtype, pool: KVCache, codec: BlockCodec | None) -> Costs:
    """Costs of a token on one of ``tp_size`` ranks; slots of ``pool``, which holds nothing yet, are overwritten.

    Args:
        config: the ``hf_text_config`` of the model.
        dtype: what the model computes in.
        codec: of the cold tier, or None.
    """
    device = torch.device(pool.device)
    weights, attention = model_flops(config)
    rate = matmul_rate(device, dtype)
    num_rows = min(_RESTORED_TOKENS, pool.size, getattr(config, "max_position_embeddings", _RESTORED_TOKENS))
    restore_ns = _restore_ns(pool, codec, num_rows) if codec is not None else 0
    return Costs(max(1, int(weights / tp_size / rate * 1e9)), int(attention / tp_size / rate * 1e9), restore_ns)


def model_flops(config: Any) -> tuple[int, int]:
    """Floating-point operations of one token: in the layers' weights, and in attention to 1024 tokens before it.

    Experts count as many as a token visits. The embedding is a look-up, and the head sees one token of a prefill.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        inner = (getattr(config, "moe_intermediate_size", None) or inner) * experts
        inner += getattr(config, "shared_expert_intermediate_size", None) or 0
    weights = hidden * head_dim * 2 * (heads + kv_heads) + 3 * hidden * inner
    return 2 * config.num_hidden_layers * weights, 4 * config.num_hidden_layers * heads * head_dim * _ATTENTION_STEP


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a matrix product that fills the device."""
    rows, width = (256, 1024) if device.type == "cpu" else (4096, 4096)
    left, right = (torch.ones(n, width, dtype=dtype, device=device) for n in (rows, width))
    return 2 * rows * width * width / _best_seconds(lambda: left @ right, device)


def _restore_ns(pool: KVCache, codec: BlockCodec, num_rows: int) -> int:
    """Nanoseconds to decode a token of a block of ``num_rows``."""
    device = torch.device(pool.device)
    # spread over the pool, as slots are after a while
    slots = pool.page_size + torch.arange(num_rows, device=device) * (pool.size // num_rows)
    rows = pool_rows(pool)
    for buffer in (*rows.keys, *rows.values):
        buffer[slots] = 0  # whatever a warm-up left there
    data = codec.encode(slots, 0)
    seconds = _best_seconds(lambda: codec.decode(data, 0, num_rows, slots, 0), device)
    return max(1, int(seconds / num_rows * 1e9))


def _best_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The shortest of a few runs: what else the machine does must not count."""
    synchronize = torch.get_device_module(device).synchronize
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first one warms up
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best
