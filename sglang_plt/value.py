"""The ``value`` policy: what goes first is worth least, by (probability of reuse) x (time saved) / (bytes held).

The probability, as a rate per request of holding, is :class:`sglang_plt.hazard.HazardTable`'s index of the node's
class and age. A node's class is set by the last request through it: whether that request ended in the node, how often
the node was used again before, which share of the request had been seen before, how long the answer was. Time saved
and bytes come from frozen rates. Everything is an integer on a logical clock, so ranks that serve the same requests
agree.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from sglang_plt.hazard import HORIZON, Class, HazardTable
from sglang_plt.lanes import LaneQueue

if TYPE_CHECKING:
    from sglang_plt.keys import Namespace
    from sglang_plt.node import Node

MAX_NAMESPACES = 16
"""Namespaces with statistics of their own; what comes later reads the common statistics and feeds none."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a token costs, measured once and frozen; the same integers on every rank.

    Attributes:
        prefill_ns: time to compute a token without attention to those before it.
        attention_ns: what every 1024 tokens before it add.
        restore_ns: time to bring back a token of the tier in question; 0 where it is used as it lies.
        token_bytes: bytes that a token of the tier holds.
    """

    prefill_ns: int = 100_000
    attention_ns: int = 0
    restore_ns: int = 0
    token_bytes: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name}={value!r} must be an integer, so that ranks agree")
            if value < int(field.name in ("prefill_ns", "token_bytes")):
                raise ValueError(f"{field.name}={value} is too small")

    def saving(self, position: int, token_bytes: int | None = None) -> int:
        """Picoseconds saved per byte held by a token at ``position``, to three significant bits.

        Args:
            token_bytes: that it holds; default: what all do.
        """
        saved = self.prefill_ns + self.attention_ns * (position >> 10) - self.restore_ns
        exact = max(1, saved * 1000 // (token_bytes or self.token_bytes))
        shift = max(0, exact.bit_length() - 3)
        return exact >> shift << shift


class _Record(NamedTuple):
    when: int  # request
    table: HazardTable
    cls: Class
    reuses: int


class _RatedOrder(ABC):
    """Nodes by what they are worth in one tier: probability of reuse times saving.

    Args:
        rates: of the tier whose queue decides.
        unit_tokens: tokens that one unit of a key stands for.
    """

    def __init__(self, rates: Rates, unit_tokens: int):
        self.rates = rates
        self.unit_tokens = unit_tokens

    @property
    @abstractmethod
    def now(self) -> int:
        """Requests observed so far."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Changes when values that were given before may be out of date."""

    @abstractmethod
    def record(self, node: Node) -> _Record:
        """What the last request through ``node`` left."""

    def __call__(self, node: Node) -> tuple[int, int]:
        """(value, last request) of ``node``: the smallest goes first."""
        record = self.record(node)
        return record.table.index(record.cls, self.now - record.when) * self.saving(node), record.when

    def saving(self, node: Node) -> int:
        return self.rates.saving(node.start * self.unit_tokens)

    def make_queue(self) -> LaneQueue:
        """A queue of this order, for a trie without nodes."""
        return LaneQueue(self)


class ValueOrder(_RatedOrder):
    """The policy's state, and the order of its queues.

    Its owner calls :meth:`observe` after every request, and :meth:`on_split` for every split of the trie; queues are
    made by :meth:`make_queue` when the trie starts or is cleared, which forgets nodes but not what was learned.

    Args:
        rates: of the tier whose queue decides; default: every token is worth the same.
        unit_tokens: tokens that one unit of a key stands for.
    """

    def __init__(self, rates: Rates | None = None, unit_tokens: int = 1):
        super().__init__(rates or Rates(), unit_tokens)
        self._now = 0
        self._common = HazardTable()
        self._tables: dict[Namespace | None, HazardTable] = {None: self._common}
        self._records: dict[int, _Record] = {}
        self._log: deque[tuple[int, int, list[int]]] = deque()  # request, its clock, nodes that it recorded
        self._forgotten = -1  # nodes that were last used at this clock have no record any more

    def make_queue(self) -> LaneQueue:
        self._records.clear()
        self._log.clear()
        self._forgotten = -1
        for table in self._tables.values():
            table.forget_waiting()
        return super().make_queue()

    def in_tier(self, rates: Rates) -> TierOrder:
        """The order of a tier with other rates, which learns what this one learns."""
        return TierOrder(self, rates)

    def record(self, node: Node) -> _Record:
        """What the last request through ``node`` left; a node of no finished request is an average one, just used."""
        record = self._records.get(node.id)
        if record is None:
            age = HORIZON if node.last_access <= self._forgotten else 0
            record = _Record(self._now - age, self._common, (), 0)
        return record

    @property
    def now(self) -> int:
        return self._now

    @property
    def version(self) -> int:
        return sum(table.version for table in self._tables.values())

    # -- learning -------------------------------------------------------------------------------------------------

    def on_split(self, upper: Node, lower: Node, length: int) -> None:
        """``upper`` is cut off the top of ``lower`` and has the same past; as ``Trie.on_split``."""
        record = self._records.get(lower.id)
        if record is not None:
            self._records[upper.id] = record
            if self._log:
                self._log[-1][2].append(upper.id)

    def observe(self, end: Node, matched_len: int, output_len: int, prompt_len: int | None = None) -> None:
        """A request has been served: its sequence ends with ``end``, ``matched_len`` units of it were resident before.

        Args:
            output_len: tokens that the model answered with.
            prompt_len: units of the sequence that were asked; default: all of it, as where answers are not kept.
        """
        self._now = now = self._now + 1
        for table in self._tables.values():
            table.advance(now)
        self._forget()
        path: list[Node] = []
        walk: Node | None = end
        while walk is not None and walk.parent is not None:
            path.append(walk)
            walk = walk.parent
        self._log.append((now, end.last_access, [node.id for node in path]))
        if not path:
            return
        namespace = end.key.namespace
        table = self._table(namespace)
        learns = namespace is None or table is not self._common
        total = end.stop
        share = min(2, 3 * matched_len // (prompt_len or total))
        answer = min(7, ((output_len + 1).bit_length() - 1) // 2)
        if learns:
            table.count_request(total)
        for node in path:
            record, tokens = self._records.get(node.id), len(node)
            reuses = 0
            if record is not None:
                reuses = record.reuses + 1
                if learns:
                    table.reused(record.cls, record.when, tokens)
            cls = (int(node is end and node.start > 0), min(4, reuses), share, answer)
            if learns:
                table.used(cls, tokens)
            self._records[node.id] = _Record(now, table, cls, reuses)
            if node.queue is not None:
                node.queue.add(node)

    def _table(self, namespace: Namespace | None) -> HazardTable:
        """Namespaces are walls: each learns from its own requests, and salted ones feed no statistics at all.

        Shared is only the clock: without it, values of different namespaces could not be compared.
        """
        table = self._tables.get(namespace)
        if table is not None:
            return table
        salted = namespace is not None and namespace[1] is not None
        if salted or len(self._tables) > MAX_NAMESPACES:
            return self._common
        table = self._tables[namespace] = HazardTable()
        table.advance(self._now)
        return table

    def _forget(self) -> None:
        """Drop records that no request renewed for a horizon, so that removed nodes leave nothing behind."""
        while self._log and self._log[0][0] <= self._now - HORIZON:
            when, self._forgotten, ids = self._log.popleft()
            for id in ids:
                record = self._records.get(id)
                if record is not None and record.when <= when:
                    del self._records[id]


class TierOrder(_RatedOrder):
    """A :class:`ValueOrder` with the rates of another tier."""

    def __init__(self, learned: ValueOrder, rates: Rates):
        super().__init__(rates, learned.unit_tokens)
        self._learned = learned

    @property
    def now(self) -> int:
        return self._learned.now

    @property
    def version(self) -> int:
        return self._learned.version

    def record(self, node: Node) -> _Record:
        return self._learned.record(node)

    def saving(self, node: Node) -> int:
        """By the bytes of the node's own blocks, where it has any: a difference from another block holds few."""
        position = node.start * self.unit_tokens
        if not node.views:
            return self.rates.saving(position)
        held = sum(view.block.num_bytes * len(view) // view.block.num_rows for view in node.views)
        return self.rates.saving(position, max(1, held // (len(node) * self.unit_tokens)))
