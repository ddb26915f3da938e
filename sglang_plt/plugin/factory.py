"""Builds the cache in the scheduler process from what SGLang hands to a radix-cache backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_plt.config import ConfigError, PLTConfig
from sglang_plt.plugin.options import check_hooks, options_of
from sglang_plt.plugin.refusals import check_flags, check_model
from sglang_plt.plugin.seams import check_seams

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

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
    config = PLTConfig.from_options(options_of(context.server_args))
    check_flags(context.server_args, config)
    check_model(context)

    from sglang_plt.cache.prefix_cache import PLTRadixCache
    from sglang_plt.host.codec import PoolCodec
    from sglang_plt.host.ranks import make_agree_min
    from sglang_plt.plugin import tree_route

    tree_route.install()
    params = context.params
    pool = params.token_to_kv_pool_allocator.get_kvcache()
    codec = None
    budget = 0
    if config.has_cold_tier:
        codec = PoolCodec(config.codec, pool, context)
        budget = config.budget_bytes(codec.pool_bytes)
        _check_budget(budget, codec, params.page_size, context.tp_size)
    cache = PLTRadixCache(
        params,
        config,
        codec,
        budget,
        rank=context.tp_rank,
        agree_min=make_agree_min(params.tp_cache_group),
    )
    logger.info(
        "PLT cache: codec=%s cold_budget=%d bytes a rank (%.2f times the pool) page_size=%d policy=%s "
        "restore_threshold=%d write_ahead=%d replay_tokens=%d delta_threshold=%g%s",
        codec.describe() if codec is not None else "none",
        budget,
        budget / codec.pool_bytes if codec is not None else 0.0,
        params.page_size,
        params.eviction_policy,
        config.restore_threshold,
        config.write_ahead,
        config.replay_tokens,
        config.delta_threshold,
        f" decision_log={config.decision_log}" if config.decision_log else "",
    )
    return cache


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
