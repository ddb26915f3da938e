"""The KV pool of a running server as rows a codec can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_plt.codec.rows import PoolRows, RowLayout

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


class UnsupportedPool(ValueError):
    """The model keeps its KV in a pool that the cold tier cannot read."""


def pool_rows(pool: KVCache) -> PoolRows:
    """The key and value buffers of ``pool``, shared and not copied.

    A row of an MLA pool is the latent and, behind it, the channels that rotate; it counts as a key, without values.

    Raises:
        UnsupportedPool: any pool but plain multi-head or latent attention in one dtype.
    """
    # subclasses keep scales or other layouts beside the rows, so only the classes themselves will do
    latent = type(pool) is MLATokenToKVPool and not pool.use_dsa
    plain = type(pool) is MHATokenToKVPool and not pool.is_quantized_kv_cache
    if not latent and not plain:
        raise UnsupportedPool(
            f"--radix-cache plt cannot keep the KV of a {type(pool).__name__} as this one is set up; it serves plain "
            "MHATokenToKVPool and MLATokenToKVPool. Drop the flag, or switch the cold tier off with --plt-cold-bytes 0."
        )
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    keys = tuple(pool.get_key_buffer(layer) for layer in layers)
    if latent:
        values = tuple(key.new_empty(len(key), 1, 0) for key in keys)
    else:
        values = tuple(pool.get_value_buffer(layer) for layer in layers)
    _, kv_heads, head_dim = keys[0].shape
    layout = RowLayout(len(keys), kv_heads, head_dim, values[0].shape[-1], keys[0].dtype)
    return PoolRows(layout, keys, values)
