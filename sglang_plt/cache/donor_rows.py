"""Rows of a prompt in the trie, hot or cold, copied to slots of their own and turned to other positions."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sglang_plt.keys import Key, Namespace
from sglang_plt.near_miss import Refusal
from sglang_plt.node import Node

if TYPE_CHECKING:
    from sglang_plt.cache.prefix_cache import PLTRadixCache

logger = logging.getLogger(__name__)


class Mover(Protocol):
    """Copies rows between slots; see :class:`sglang_plt.host.mover.RowMover`."""

    def can_shift(self, position: int, num_rows: int, shift: int) -> bool: ...

    def copy(self, source: Any, target: Any, position: int, shift: int) -> None: ...

    def deviation(self, one: Any, other: Any) -> float: ...


class DonorRows:
    """Takes rows of donors for one cache."""

    def __init__(self, cache: PLTRadixCache, mover: Mover):
        self._cache = cache
        self._mover = mover

    def resident(self, namespace: Namespace | None, tokens: np.ndarray) -> int:
        """How much of a donor is still there, hot or cold."""
        _, last = self._cache.trie.match(_key(tokens, namespace))
        return last.stop

    def take(
        self, namespace: Namespace | None, tokens: np.ndarray, donor: int, length: int, start: int
    ) -> Any | Refusal:
        """New slots with the rows of positions ``[donor, donor + length)`` of ``tokens``, as of ``start`` on.

        All ranks get their rows, or none does.
        """
        cache = self._cache
        if not self._mover.can_shift(donor, length, start - donor):
            return Refusal.REQUEST
        whole_pages = -(-(donor + length) // cache.page_size) * cache.page_size
        hot, last = cache.trie.match(_key(tokens[:whole_pages], namespace))
        if last.stop < donor + length:
            return Refusal.DONOR_GONE
        cache.trie.pin(last)
        cache.trie.lock(hot)
        try:
            slots = cache._allocate(length)
            if slots is None:
                return Refusal.NO_ROOM
            if not cache.agree_min(int(self._fill(last, donor, start, slots))):
                cache._free(slots)
                return Refusal.DONOR_GONE
        finally:
            cache.trie.unlock(hot)
            cache.trie.unpin(last)
        return slots

    def _fill(self, last: Node, donor: int, start: int, slots: Any) -> bool:
        path: list[Node] = []
        node = last
        while node.parent is not None and node.stop > donor:
            path.append(node)
            node = node.parent
        try:
            for node in reversed(path):
                low, high = max(node.start, donor), min(node.stop, donor + len(slots))
                if low >= high:
                    continue
                target = source = slots[low - donor : high - donor]
                if node.hot:
                    source = node.slots[low - node.start : high - node.start]
                else:
                    self._cache.cold.read(node, low, high, target)
                self._mover.copy(source, target, low, start - donor)
        except Exception as error:
            logger.warning("PLT cache: near-miss rows cannot be taken over: %s: %s", type(error).__name__, error)
            return False
        return True


def _key(tokens: np.ndarray, namespace: Namespace | None) -> Key:
    return Key(array("q", tokens.astype(np.int64).tobytes()), namespace)
