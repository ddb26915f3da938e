"""An eviction queue for values that change with age.

Such a queue cannot be one heap. Nodes of one class and one saving per byte form a *lane*; within a lane the value is a
function of the age alone. It mostly rises before it falls, so a lane offers its oldest and its newest node, and the
lesser of the offers goes first. A request looks at every lane once, an eviction only at the lane it took from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sglang_plt.hazard import Class, HazardTable
from sglang_plt.queues import NodeQueue

if TYPE_CHECKING:
    from sglang_plt.node import Node


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

    @property
    def now(self) -> int: ...

    @property
    def version(self) -> int: ...

    def record(self, node: Node) -> LaneRecord: ...

    def saving(self, node: Node) -> int: ...


_LaneKey = tuple[int, Class, int]  # id of the table, class, saving


class _Lane:
    """Nodes of one class and saving; entries ``(+-when, -start, id, stamp, node)``, the oldest and the newest first."""

    __slots__ = ("cls", "newest", "oldest", "saving", "table")

    def __init__(self, table: HazardTable, cls: Class, saving: int) -> None:
        self.table, self.cls, self.saving = table, cls, saving
        self.oldest: list[Any] = []
        self.newest: list[Any] = []


class LaneQueue(NodeQueue):
    """Nodes by an :class:`AgingOrder`."""

    def __init__(self, order: AgingOrder):
        super().__init__()
        self.order = order
        self._lanes: dict[_LaneKey, _Lane] = {}
        self._changed: dict[_LaneKey, None] = {}  # lanes to look at again; a dict keeps their order
        self._front: list[Any] = []  # heap of (value, when, -start, id, stamp, node, lane key)
        self._offered: set[tuple[int, int]] = set()  # (id, stamp) of what the front got: nothing is in it twice
        self._seen = (-1, -1)  # request and version of the order that the front is of
        self._num_entries = 0

    def peek(self) -> Node | None:
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
            if self._is_live(node, entry[4]):
                return node
            heapq.heappop(front)
            self._changed[entry[6]] = None

    def _push(self, node: Node) -> None:
        self._enter(node, *self._place(node))

    def _place(self, node: Node) -> tuple[_LaneKey, int]:
        """The lane of ``node``, and when it was last used."""
        record, saving = self.order.record(node), self.order.saving(node)
        key = (id(record.table), record.cls, saving)
        if key not in self._lanes:
            self._lanes[key] = _Lane(record.table, record.cls, saving)
        return key, record.when

    def _enter(self, node: Node, key: _LaneKey, when: int) -> None:
        lane, stamp = self._lanes[key], node.queue_stamp
        heapq.heappush(lane.oldest, (when, -node.start, node.id, stamp, node))
        heapq.heappush(lane.newest, (-when, -node.start, node.id, stamp, node))
        self._num_entries += 1
        self._changed[key] = None

    def _look_at(self, key: _LaneKey) -> None:
        """Put the oldest and the newest node of a lane into the front."""
        lane = self._lanes[key]
        for heap in (lane.oldest, lane.newest):
            while heap and not self._is_live(heap[0][4], heap[0][3]):
                self._skip(heap, heap[0][4], heap[0][3])
            if heap and (heap[0][2], heap[0][3]) not in self._offered:
                when, start, node_id, stamp, node = heap[0]
                self._offered.add((node_id, stamp))
                when = abs(when)
                value = lane.table.index(lane.cls, self.order.now - when) * lane.saving
                heapq.heappush(self._front, (value, when, start, node_id, stamp, node, key))

    def _is_untidy(self) -> bool:
        return self._num_entries > 2 * self._live + self._SLACK

    def _tidy(self) -> None:
        entries = [
            (entry[4], entry[0])
            for lane in self._lanes.values()
            for entry in lane.oldest
            if self._is_live(entry[4], entry[3])
        ]
        self._lanes.clear()
        self._front.clear()
        self._offered.clear()
        self._changed.clear()
        self._num_entries = 0
        for node, waits_since in entries:
            key, when = self._place(node)
            self._enter(node, key, min(when, waits_since))  # a node without a record was not used just now

    def _snapshot(self) -> Callable[[], None]:
        front, offered, changed = self._front.copy(), self._offered.copy(), self._changed.copy()

        def undo() -> None:
            self._front, self._offered, self._changed = front, offered, changed

        return undo
