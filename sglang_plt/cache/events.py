"""KV placement events: what SGLang's recorder wants of a node, made from ours only where events are on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import split_node_hash_value

from sglang_plt.keys import Key, is_near_miss
from sglang_plt.trie import Node, OnSplit

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


def radix_key(key: Key) -> RadixKey:
    """Our key in SGLang's terms."""
    extra_key, cache_salt = key.namespace or (None, None)
    return RadixKey(key.tokens, extra_key, is_bigram=key.bigram, cache_salt=cache_salt)


class _EventNode:
    """The face of a node that the recorder reads and writes: ``key``, ``parent`` and the two hash lists."""

    def __init__(self, node: Node):
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "key", radix_key(node.key))

    @property
    def parent(self) -> _EventNode | None:
        return None if self._node.parent is None else _EventNode(self._node.parent)

    def __getattr__(self, name: str) -> Any:
        if name in ("hash_value", "event_hash_value"):
            return getattr(self._node, name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("hash_value", "event_hash_value"), name
        setattr(self._node, name, value)


class TrieEvents:
    """Feeds SGLang's :class:`KVCacheEventRecorder` from a trie; device placement only.

    Attributes:
        on_split: what the trie has to call, or None.
    """

    def __init__(self, params: CacheInitParams):
        self.recorder = KVCacheEventRecorder(
            enabled=params.enable_kv_cache_events and not params.disable,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        self._page_size = params.page_size
        self.on_split: OnSplit | None = self._split if self.recorder.enabled else None

    def stored(self, node: Node) -> None:
        if self.recorder.enabled and not is_near_miss(node.key.namespace):
            self.recorder.record_store(_EventNode(node))

    def removed(self, node: Node) -> None:
        if self.recorder.enabled and not is_near_miss(node.key.namespace):
            self.recorder.record_remove(_EventNode(node))

    def all_cleared(self) -> None:
        self.recorder.record_all_cleared()

    def _split(self, upper: Node, lower: Node, length: int) -> None:
        for name in ("hash_value", "event_hash_value"):
            first, rest = split_node_hash_value(getattr(lower, name), length, self._page_size)
            setattr(upper, name, first)
            setattr(lower, name, rest)
