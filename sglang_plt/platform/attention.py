"""Attention of a chunk behind a cached prefix, for the new tokens alone.

SGLang's ``torch_native`` backend computes it for the prefix as well, with queries it never had, and drops that part: a
cache hit then costs as much attention as computing everything. Here a mask takes the place of the missing queries.
Everything but plain causal attention is left to SGLang.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import scaled_dot_product_attention

HOOK = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def install() -> None:
    """Register the hook; it is applied with those of all plug-ins."""
    HookRegistry.register(HOOK, _around_extend, HookType.AROUND)


def _around_extend(
    original: Any,
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if not causal or windowed or is_cross_attn or encoder_lens is not None or not bool(extend_prefix_lens.any()):
        return original(
            backend,
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling,
            enable_gqa,
            causal,
            is_cross_attn,
            sliding_window_size,
        )
    start = 0
    for row, length, count in zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True):
        slots = req_to_token[row, :length]
        new = query[start : start + count].movedim(0, 1)
        keys, values = (cache[slots].movedim(0, 1).to(query.dtype) for cache in (k_cache, v_cache))
        hit = count < length
        mask = torch.ones(count, length, dtype=torch.bool, device=query.device).tril(length - count) if hit else None
        found = scaled_dot_product_attention(
            new.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            enable_gqa=enable_gqa,
            scale=scaling,
            is_causal=not hit,
        )
        output[start : start + count] = found.squeeze(0).movedim(0, 1)
        start += count
    return output
