"""Where layer-wise restore meets SGLang: the pool's layer counter, and the number by which a batch waits for it.

SGLang sets that number for its own hierarchical cache only; the hook sets it for ours. It is put in place with a cache
that restores layer by layer, in the scheduler's process only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_plt.cache.layer_restores import LayerRestores
from sglang_plt.config import ConfigError
from sglang_plt.host.side_stream import DeviceSideStream
from sglang_plt.plugin.hooks import put_in_place
from sglang_plt.plugin.seams import Seam, check_seams

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_plt.cache.cold_tier import ColdTier
    from sglang_plt.host.codec import PoolCodec

logger = logging.getLogger(__name__)

OPTION = "--plt-layerwise-restore=on"
HOOK = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"
SEAMS = (
    Seam("sglang.srt.managers.schedule_batch.ScheduleBatch", parameters=("tree_cache", "hicache_consumer_index")),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker",
        members=("register_hicache_layer_transfer_counter", "set_hicache_consumer", "forward_batch_generation"),
    ),
    Seam("sglang.srt.mem_cache.memory_pool.KVCache", members=("register_layer_transfer_counter",)),
)


def add(cold: ColdTier, codec: PoolCodec, context: TreeCacheBuildContext) -> None:
    """Let the cold tier restore layer by layer; on a CPU it goes on restoring before the forward pass, and says so.

    Raises:
        ConfigError: the forward pass does not say which batch it runs.
        SeamError: this SGLang is not the one we were written for.
    """
    if context.server_args.enable_pdmux:
        raise ConfigError(f"{OPTION} does not go with --enable-pdmux; switch one off")
    if not context.model_config.is_generation:
        raise ConfigError(f"{OPTION} does not serve embedding models; switch it off")
    pool = context.params.token_to_kv_pool_allocator.get_kvcache()
    device = torch.device(pool.device)
    if device.type != "cuda":
        logger.warning("PLT cache: %s has no use on %s: restores are done before the forward pass", OPTION, device.type)
        return
    register(LayerRestores(codec.num_layers, codec.begin, DeviceSideStream(device)), cold, pool, context.tp_worker)


def register(layers: LayerRestores, cold: ColdTier, pool: Any, worker: Any) -> None:
    """Let ``cold`` restore with ``layers``, ``pool`` wait for them, and ``worker`` say which batch runs.

    Raises:
        SeamError: this SGLang is not the one we were written for, or could not apply the hook.
    """
    check_seams(SEAMS)
    put_in_place({HOOK: (_before_prepare_for_extend, HookType.BEFORE)})
    pool.register_layer_transfer_counter(layers)
    worker.register_hicache_layer_transfer_counter(layers)
    cold.layers = layers


def _before_prepare_for_extend(batch: Any, *args: Any, **kwargs: Any) -> None:
    layers = getattr(getattr(batch.tree_cache, "cold", None), "layers", None)
    if layers is not None:
        batch.hicache_consumer_index = layers.ready()
