"""Prompts whose rows were computed, in case that one comes which is nearly the same."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator

import numpy as np

from sglang_plt.similar import FragmentIndex

_TRIED = 4  # candidates that are aligned; each costs milliseconds for long prompts


class Donors:
    """Token sequences by namespace; whether their rows are still there is for the trie to say.

    Args:
        most_tokens: of all sequences; the one used or added longest ago goes first.
    """

    def __init__(self, most_tokens: int = 1 << 22):
        self._most_tokens = most_tokens
        self.clear()

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Host memory, estimated."""
        return self._index.num_bytes

    def add(self, namespace: Hashable, tokens: array) -> None:
        """Offer a sequence; what it continues is offered no more, what continues it makes it needless."""
        rows = np.frombuffer(tokens, np.int64)
        if not 0 < len(rows) <= self._most_tokens:
            return
        for candidate in self._index.find(namespace, rows, _TRIED):
            known = self._index.tokens(candidate.item)
            shorter = min(len(known), len(rows))
            if np.array_equal(known[:shorter], rows[:shorter]):
                if shorter == len(rows):
                    self._sizes.move_to_end(candidate.item)
                    return
                self.remove(candidate.item)
        self._last += 1
        self._index.add(self._last, namespace, rows)
        self._sizes[self._last] = len(rows)
        self._tokens += len(rows)
        while self._tokens > self._most_tokens:
            self.remove(next(iter(self._sizes)))

    def remove(self, item: int) -> None:
        """Forget a sequence; nothing happens when it is not there."""
        self._tokens -= self._sizes.pop(item, 0)
        self._index.remove(item)

    def find(self, namespace: Hashable, tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """``(item, tokens)`` of those that share most with ``tokens``, best first; namespaces are walls."""
        for candidate in self._index.find(namespace, tokens, _TRIED):
            yield candidate.item, self._index.tokens(candidate.item)

    def used(self, item: int) -> None:
        """Keep a sequence longer."""
        if item in self._sizes:
            self._sizes.move_to_end(item)

    def clear(self) -> None:
        """Forget all."""
        self._index = FragmentIndex(32, 32)
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._tokens = self._last = 0
