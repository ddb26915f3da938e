"""One edge of the trie and what is known of it; no SGLang and no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_plt.blocks import View
from sglang_plt.keys import Key

if TYPE_CHECKING:
    from sglang_plt.clusters import Best
    from sglang_plt.queues import NodeQueue


class Node:
    """One edge of the trie with its payload. ``start`` is the absolute position of its first token."""

    __slots__ = (
        "best",
        "children",
        "created",
        "event_hash_value",
        "hash_value",
        "hit_count",
        "hot_children",
        "id",
        "key",
        "last_access",
        "lock_count",
        "lossy",
        "model_bits",
        "parent",
        "pin_count",
        "priority",
        "queue",
        "queue_stamp",
        "resident_children",
        "slots",
        "start",
        "total",
        "views",
        "weight",
    )

    def __init__(self, id: int, parent: Node | None, key: Key, start: int, now: int, priority: int):
        self.id = id
        self.parent = parent
        self.key = key
        self.start = start
        self.children: dict[Any, Node] = {}
        self.slots: Any = None
        self.views: list[View] = []
        self.lossy = False  # the slots hold decoded values: never encode them again
        self.lock_count = 0  # running requests that read the slots
        self.pin_count = 0  # restores in flight that read the views
        self.hot_children = 0
        self.resident_children = 0
        self.last_access: int = now
        self.created: int = now
        self.hit_count: int = 0
        self.priority: int = priority
        self.weight = 0  # how often the prefix went on here, in units of probability.ONE
        self.total = 0  # how often it went on behind this node
        self.model_bits: int | None = None  # -log2 P(this edge) by the model, in units of 1 / probability.BIT
        self.best: Best | None = None  # of clusters.Clusters
        self.queue: NodeQueue | None = None
        self.queue_stamp = 0
        self.hash_value: list[str] | None = None
        self.event_hash_value: list[str] | None = None

    def __len__(self) -> int:
        return self.key.length

    def __repr__(self) -> str:
        return f"Node(id={self.id}, start={self.start}, len={len(self)}, {self.tier}, locks={self.lock_count})"

    @property
    def hot(self) -> bool:
        return self.slots is not None

    @property
    def cold(self) -> bool:
        return self.slots is None and bool(self.views)

    @property
    def resident(self) -> bool:
        return self.slots is not None or bool(self.views)

    @property
    def tier(self) -> str:
        return "hot" if self.hot else "cold" if self.views else "replay"

    @property
    def stop(self) -> int:
        """Absolute position behind the last token."""
        return self.start + self.key.length
