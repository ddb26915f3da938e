"""Which stored token sequences share fragments with a given one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from sglang_plt.similar.fragments import as_tokens, gram_hashes, winnow

# bytes that CPython 3.11 and numpy take beside the data (a test holds the sum against tracemalloc)
_ITEM_BYTES = 400  # an entry, its two arrays, its place in a dictionary
_FRAGMENT_BYTES = 130  # a key, the tuple of its items, their place in a dictionary
_POSTING_BYTES = 8
_NAMESPACE_BYTES = 300


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored item that shares fragments with what was asked for.

    Attributes:
        item: what was added.
        shared: sampled fragments in common, at least 1: an estimate of how much is shared, about one for 8 tokens.
    """

    item: int
    shared: int


@dataclass(eq=False, frozen=True, slots=True)
class _Entry:
    namespace: Hashable
    tokens: np.ndarray
    fragments: np.ndarray  # those whose postings list the item, uint64


class FragmentIndex:
    """Which stored token sequences share fragments (winnowed n-grams) with a given one; namespaces are walls.

    A stored sequence that shares a run of ``fragment + window - 1`` tokens with a given one is found for certain,
    unless each sampled fragment of the run had ``max_per_fragment`` items of the namespace already when it was added.
    Those that came first keep the places: many relatives of one text then meet at few items, and not each at the one
    before it, and adding an item never hides another. A place that removal frees goes to the next item added.

    Answers depend on the calls alone, never on hash seeds or time: ranks that make the same calls get the same answers.
    Memory is bounded by the items: tokens, and at most one posting for each n-gram. Not for several threads at once.

    Args:
        fragment: tokens of a fragment.
        window: consecutive fragments of which one is kept.
        max_per_fragment: most items listed for one fragment.
    """

    def __init__(self, fragment: int = 16, window: int = 16, max_per_fragment: int = 16):
        for name, value in (("fragment", fragment), ("window", window), ("max_per_fragment", max_per_fragment)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.fragment = fragment
        self.window = window
        self.max_per_fragment = max_per_fragment
        self.clear()

    def add(self, item: int, namespace: Hashable, tokens: np.ndarray) -> None:
        """Take a copy of ``tokens`` (integers [n], n may be 0). ValueError when ``item`` is there or not positive."""
        if item < 1:
            raise ValueError(f"an item must be a positive integer, got {item}")
        if item in self._items:
            raise ValueError(f"item {item} is there already")
        tokens = as_tokens(tokens)
        sampled = self._fragments(tokens)
        kept = []
        if len(sampled):
            postings = self._postings.setdefault(namespace, {})
            known = len(postings)
            for fragment in sampled.tolist():
                listed = postings.get(fragment, ())
                if len(listed) < self.max_per_fragment:
                    postings[fragment] = (*listed, item)
                    kept.append(fragment)
            self._num_fragments += len(postings) - known
        entry = _Entry(namespace, _narrowed(tokens), np.array(kept, dtype=np.uint64))
        entry.tokens.flags.writeable = False
        self._items[item] = entry
        self._num_postings += len(entry.fragments)
        self._num_data_bytes += entry.tokens.nbytes + entry.fragments.nbytes

    def remove(self, item: int) -> None:
        """Forget ``item``; nothing happens when it is not there. Costs its fragments."""
        entry = self._items.pop(item, None)
        if entry is None:
            return
        self._num_postings -= len(entry.fragments)
        self._num_data_bytes -= entry.tokens.nbytes + entry.fragments.nbytes
        if not len(entry.fragments):
            return
        postings = self._postings[entry.namespace]
        known = len(postings)
        for fragment in entry.fragments.tolist():
            left = tuple(other for other in postings[fragment] if other != item)
            if left:
                postings[fragment] = left
            else:
                del postings[fragment]
        self._num_fragments += len(postings) - known
        if not postings:
            del self._postings[entry.namespace]

    def __contains__(self, item: int) -> bool:
        return item in self._items

    def __len__(self) -> int:
        """Items."""
        return len(self._items)

    def tokens(self, item: int) -> np.ndarray:
        """The very tokens of ``item``: int32 [n] where they fit, else int64; read-only. KeyError without the item."""
        return self._items[item].tokens

    def find(self, namespace: Hashable, tokens: np.ndarray, limit: int = 8) -> list[Candidate]:
        """The ``limit`` items of ``namespace`` that share most sampled fragments with ``tokens`` (integers [n]).

        Most shared first, of equals the smaller item first. An item that holds the same tokens is among them. A shared
        fragment is a shared hash: align before believing it. ValueError when ``limit`` is below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        tokens = as_tokens(tokens)
        postings = self._postings.get(namespace)
        if postings is None:
            return []
        shared: dict[int, int] = {}
        for fragment in self._fragments(tokens).tolist():
            for item in postings.get(fragment, ()):
                shared[item] = shared.get(item, 0) + 1
        best = sorted(shared.items(), key=lambda pair: (-pair[1], pair[0]))
        return [Candidate(item, count) for item, count in best[:limit]]

    def clear(self) -> None:
        """Forget all items."""
        self._items: dict[int, _Entry] = {}
        self._postings: dict[Hashable, dict[int, tuple[int, ...]]] = {}
        self._num_fragments = 0
        self._num_postings = 0
        self._num_data_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory taken, estimated from counts alone: the same on every rank, within a third of what is allocated."""
        return (
            self._num_data_bytes
            + _ITEM_BYTES * len(self._items)
            + _FRAGMENT_BYTES * self._num_fragments
            + _POSTING_BYTES * self._num_postings
            + _NAMESPACE_BYTES * len(self._postings)
        )

    def _fragments(self, tokens: np.ndarray) -> np.ndarray:
        return winnow(gram_hashes(tokens, self.fragment), self.window)


def _narrowed(tokens: np.ndarray) -> np.ndarray:
    """A copy, of half the size where all tokens fit."""
    limits = np.iinfo(np.int32)
    fits = not len(tokens) or (tokens.min() >= limits.min and tokens.max() <= limits.max)
    return tokens.astype(np.int32 if fits else np.int64, copy=True)
