"""Builds the cache in the scheduler process from what SGLang hands to a radix-cache backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_plt.blocks import BLOCK_TOKENS
from sglang_plt.config import PROFILED, ConfigError, PLTConfig
from sglang_plt.plugin.options import check_hooks, config_of
from sglang_plt.plugin.refusals import check_flags, check_model
from sglang_plt.plugin.seams import check_seams

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_plt.cache.policy import TierRates
    from sglang_plt.cache.prefix_cache import PLTRadixCache
    from sglang_plt.host.codec import PoolCodec

logger = logging.getLogger(__name__)


def build_cache(context: TreeCacheBuildContext) -> BasePrefixCache:
    """Factory of the backend ``plt``.

    Raises:
        SeamError: this SGLang is not the one we were written for.
        ConfigError: flags, model or budget cannot be served.
    """
    check_seams()
    check_hooks()
    config = config_of(context.server_args)
    assert config is not None, "the registry calls this for --radix-cache plt only"
    check_flags(context.server_args, config)
    check_model(context)

    from sglang_plt.cache.prefix_cache import PLTRadixCache
    from sglang_plt.codec import Workers
    from sglang_plt.host.codec import PoolCodec
    from sglang_plt.host.ranks import make_agree_max, make_agree_min
    from sglang_plt.plugin import layerwise, tree_route

    tree_route.install()
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    agree_min = make_agree_min(params.tp_cache_group)
    codec = None
    budget = 0
    if config.has_cold_tier:
        try:
            codec = PoolCodec(
                config.codec, pool, context, config.profile, config.predictive_delta, agree_min, config.triton
            )
        except ValueError as error:  # a profile, a pool or a layout that does not go with the codec
            raise ConfigError(f"--plt-codec={config.codec}: {error}") from error
        budget = config.budget_bytes(codec.pool_bytes)
        _check_budget(budget, codec, params.page_size, context.tp_size)
    policy, rates = config.policy, None
    if policy == "value":
        rates, costs = _measure_rates(context, codec)
        policy += f" ({costs})"
    cache = PLTRadixCache(
        params,
        config,
        codec,
        budget,
        rank=context.tp_rank,
        agree_min=agree_min,
        agree_max=make_agree_max(params.tp_cache_group),
        rates=rates,
        run=Workers.of_device(params.token_to_kv_pool_allocator.device),
    )
    if config.layerwise_restore and codec is not None:
        layerwise.add(cache.cold, codec, context)
    if config.may_near_miss:
        _add_near_miss(cache, context, config)
    logger.info(
        "PLT cache: codec=%s cold_budget=%d bytes a rank (%.2f times the pool) page_size=%d policy=%s "
        "delta=%s restore_threshold=%d write_ahead=%d replay_tokens=%d delta_threshold=%g near_miss=%s%s",
        codec.describe() if codec is not None else "none",
        budget,
        budget / codec.pool_bytes if codec is not None else 0.0,
        params.page_size,
        policy,
        "on" if config.delta and config.codec in PROFILED else "off",
        config.restore_threshold,
        config.write_ahead,
        config.replay_tokens,
        config.delta_threshold,
        config.near_miss + (" (requests may ask for more)" if config.near_miss_override else ""),
        f" decision_log={config.decision_log}" if config.decision_log else "",
    )
    return cache


def _add_near_miss(cache: PLTRadixCache, context: TreeCacheBuildContext, config: PLTConfig) -> None:
    """Let the cache reuse rows of prompts that are nearly the same.

    Raises:
        ConfigError: keys of this model cannot be turned to other positions, or its rows are not ours to move.
    """
    from sglang_plt.cache.grafts import Grafts
    from sglang_plt.host.mover import RowMover
    from sglang_plt.host.pool import pool_rows
    from sglang_plt.host.rotary import find_rotary
    from sglang_plt.near_miss import Limits
    from sglang_plt.plugin import near_miss

    option = f"--plt-near-miss={config.near_miss}"
    if config.near_miss_override:
        option += " with --plt-near-miss-override=on"
    if cache.is_eagle:
        raise ConfigError(f"{option} does not go with EAGLE: rows of the draft model are not moved; switch one off")
    try:
        rows = pool_rows(cache.token_to_kv_pool_allocator.get_kvcache())
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; switch it off") from error
    if not rows.layout.v_head_dim:
        raise ConfigError(f"{option} does not serve latent (MLA) rows yet; switch it off")
    runner = context.tp_worker.model_runner
    rotary = find_rotary(runner.model, rows.layout.head_dim, rows.layout.dtype)
    if rotary is None:
        raise ConfigError(f"{option}: the rotary embedding of this model is not understood; switch it off")
    mover = RowMover(rows, rotary, getattr(runner, "forward_stream", None))
    mover.warm_up()
    limits = Limits(recompute=config.near_miss_recompute, max_difference=config.near_miss_max_difference)
    cache.set_grafts(Grafts(cache, mover, config.near_miss, config.near_miss_override, limits))
    near_miss.install()


def _measure_rates(context: TreeCacheBuildContext, codec: PoolCodec | None) -> tuple[TierRates, str]:
    """Rates of both tiers, those of rank 0 on every rank, and what they were made of in words."""
    from sglang_plt.cache.policy import TierRates
    from sglang_plt.host.ranks import from_rank_0
    from sglang_plt.host.rates import Costs, measure_costs

    model, params = context.model_config, context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    costs = Costs(
        *from_rank_0(
            params.tp_cache_group,
            lambda: measure_costs(model.hf_text_config, context.tp_size, model.dtype, pool, codec),
            len(Costs._fields),
        )
    )
    text = f"a token: prefill {costs.prefill_ns} ns + {costs.attention_ns} ns for each 1024 before it"
    if codec is None:
        return TierRates.of(costs.prefill_ns, costs.attention_ns), text
    row_bytes = codec.pool_bytes // pool.size
    block_bytes = codec.num_bytes(BLOCK_TOKENS, BLOCK_TOKENS) // BLOCK_TOKENS
    return TierRates.of(*costs, row_bytes, block_bytes), (
        f"{text}, restore {costs.restore_ns} ns, {row_bytes} bytes hot, {block_bytes} cold"
    )


def _check_budget(budget: int, codec: PoolCodec, page_size: int, tp_size: int) -> None:
    import psutil

    smallest = codec.num_bytes(page_size, 0)
    if budget < smallest:
        raise ConfigError(
            f"the cold tier's budget of {budget} bytes does not hold one page of {page_size} tokens "
            f"({smallest} bytes); raise --plt-cold-bytes or --plt-cold-fraction, or set --plt-cold-bytes 0"
        )
    available = psutil.virtual_memory().available
    if budget * tp_size > available:
        raise ConfigError(
            f"the cold tier's budget of {budget} bytes on each of {tp_size} ranks exceeds the {available} bytes of "
            "host memory that are free; lower --plt-cold-bytes or --plt-cold-fraction"
        )
