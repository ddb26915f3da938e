"""An eviction queue for values that change with age.

Such a queue cannot be one heap. Nodes of one class and one saving per byte form a *lane*; within a lane the value is a
function of the age alone. It mostly rises before it falls, so a lane offers its oldest and its newest node, and the
lesser of the offers goes first. A request looks at every lane once, an eviction only at the lane it took from.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Protocol, cast

from sglang_plt.hazard import Class, HazardTable

if TYPE_CHECKING:
    from sglang_plt.node import Node
    from sglang_plt.policy import EvictionQueue


class LaneRecord(Protocol):
    """When and as what a node was last used."""

    @property
    def when(self) -> int: ...

    @property
    def table(self) -> HazardTable: ...

    @property
    def cls(self) -> Class: ...


class AgingOrder(Protocol):
    """What the queue asks of its order."""

    now: int

    @property
    def version(self) -> int: ...

    def record(self, node: Node) -> LaneRecord: ...

    def saving(self, node: Node) -> int: ...


class _Lane:
    """Nodes of one class and saving; entries ``(+-when, -start, id, stamp, node)``, the oldest and the newest first."""

    __slots__ = ("cls", "newest", "oldest", "saving", "table")

    def __init__(self, table: HazardTable, cls: Class, saving: int) -> None:
        self.table, self.cls, self.saving = table, cls, saving
        self.oldest: list[Any] = []
        self.newest: list[Any] = []


class LaneQueue:
    """Nodes by an :class:`AgingOrder`; the interface of :class:`sglang_plt.policy.EvictionQueue`."""

    _SLACK = 64

    def __init__(self, order: AgingOrder):
        self.order = order
        self._lanes: dict[tuple[int, Class, int], _Lane] = {}
        self._changed: dict[tuple[int, Class, int], None] = {}  # lanes to look at again; a dict keeps their order
        self._front: list[Any] = []  # heap of (value, when, -start, id, stamp, node, lane key)
        self._offered: set[tuple[int, int]] = set()  # (id, stamp) of what the front got: nothing is in it twice
        self._seen = (-1, -1)  # request and version of the order that the front is of
        self._live = 0
        self._num_entries = 0

    def __len__(self) -> int:
        return self._live

    def add(self, node: Node) -> None:
        """Add ``node``, or move it to where its present record puts it."""
        if node.queue is None:
            node.queue = cast("EvictionQueue", self)
            self._live += 1
        node.queue_stamp += 1
        self._push(node)
        if self._num_entries > 2 * self._live + self._SLACK:
            self._compact()

    def discard(self, node: Node) -> None:
        """Take ``node`` out; it must be in this queue."""
        assert node.queue is self
        node.queue = None
        node.queue_stamp += 1
        self._live -= 1

    def peek(self) -> Node | None:
        """The node that goes first, or None when the queue is empty."""
        order = self.order
        seen = (order.now, order.version)
        if seen != self._seen:
            self._seen = seen
            self._front.clear()
            self._offered.clear()
            self._changed = dict.fromkeys(self._lanes)
        front = self._front
        while True:
            for key in self._changed:
                self._look_at(key)
            self._changed.clear()
            if not front:
                return None
            entry = front[0]
            node: Node = entry[5]
            if node.queue is self and node.queue_stamp == entry[4]:
                return node
            heapq.heappop(front)
            self._changed[entry[6]] = None

    def frontier(self, tokens: int) -> list[Node]:
        """The nodes that go first, until they hold at least ``tokens`` tokens; the queue stays as it is."""
        taken: list[Node] = []
        while tokens > 0 and (node := self.peek()) is not None:
            taken.append(node)
            tokens -= len(node)
            self.discard(node)
        for node in taken:
            self.add(node)
        return taken

    def _push(self, node: Node) -> None:
        record = self.order.record(node)
        saving = self.order.saving(node)
        key = (id(record.table), record.cls, saving)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(record.table, record.cls, saving)
        when, stamp = record.when, node.queue_stamp
        heapq.heappush(lane.oldest, (when, -node.start, node.id, stamp, node))
        heapq.heappush(lane.newest, (-when, -node.start, node.id, stamp, node))
        self._num_entries += 1
        self._changed[key] = None

    def _look_at(self, key: tuple[int, Class, int]) -> None:
        """Put the oldest and the newest node of a lane into the front."""
        lane = self._lanes[key]
        for heap in (lane.oldest, lane.newest):
            while heap and not (heap[0][4].queue is self and heap[0][4].queue_stamp == heap[0][3]):
                heapq.heappop(heap)
            if heap and (heap[0][2], heap[0][3]) not in self._offered:
                when, start, node_id, stamp, node = heap[0]
                self._offered.add((node_id, stamp))
                when = abs(when)
                value = lane.table.index(lane.cls, self.order.now - when) * lane.saving
                heapq.heappush(self._front, (value, when, start, node_id, stamp, node, key))

    def _compact(self) -> None:
        """Drop what is out of date."""
        nodes = [
            entry[4]
            for lane in self._lanes.values()
            for entry in lane.oldest
            if entry[4].queue is self and entry[4].queue_stamp == entry[3]
        ]
        self._lanes.clear()
        self._front.clear()
        self._offered.clear()
        self._changed.clear()
        self._num_entries = 0
        for node in nodes:
            self._push(node)
