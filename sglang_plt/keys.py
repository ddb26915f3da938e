"""Keys of the trie: a token sequence in a namespace, without SGLang's types."""

from __future__ import annotations

from array import array
from typing import Any

Namespace = tuple[str | None, str | None]
"""``(extra_key, cache_salt)``: sequences of different namespaces never share a node."""


def make_namespace(extra_key: str | None, cache_salt: str | None) -> Namespace | None:
    """The namespace of a request; an empty salt is none, as in SGLang's ``RadixKey``."""
    cache_salt = cache_salt or None
    return None if extra_key is None and cache_salt is None else (extra_key, cache_salt)


class _NearMissSalt(str):
    """A salt that no request can have; equal to its like only."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NearMissSalt) and str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(("near-miss", str(self)))


def near_miss_namespace(namespace: Namespace | None) -> Namespace:
    """Where sequences with reused rows of a namespace live: apart from all that is exact, and nothing learns there."""
    extra_key, cache_salt = namespace or (None, None)
    return extra_key, _NearMissSalt(cache_salt or "")


def is_near_miss(namespace: Namespace | None) -> bool:
    """Whether sequences of a namespace hold reused rows."""
    return namespace is not None and isinstance(namespace[1], _NearMissSalt)


class Key:
    """A view of ``length`` units of a token array; nothing is copied until a slice is taken.

    A unit is a token, or with ``bigram=True`` a pair of neighbouring tokens (EAGLE), so that ``n + 1`` raw tokens make
    ``n`` units and slices share one boundary token.

    Args:
        tokens: raw token ids, ``array("q")``.
        namespace: None is the common namespace.
        length: cap in units; None means all.
    """

    __slots__ = ("bigram", "length", "namespace", "tokens")

    def __init__(
        self, tokens: array, namespace: Namespace | None = None, bigram: bool = False, length: int | None = None
    ):
        self.tokens = tokens
        self.namespace = namespace
        self.bigram = bigram
        available = max(0, len(tokens) - 1) if bigram else len(tokens)
        self.length = available if length is None else max(0, min(length, available))

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        kind = "bigrams" if self.bigram else "tokens"
        return f"Key({self.length} {kind}, namespace={self.namespace}, {list(self.tokens[:8])}...)"

    def __getitem__(self, part: slice) -> Key:
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError(f"a key slice must have step 1, got {step}")
        raw_stop = stop + 1 if self.bigram and stop > start else stop
        return Key(self.tokens[start:raw_stop], self.namespace, self.bigram)

    def aligned_len(self, page_size: int) -> int:
        """Length rounded down to whole pages."""
        return self.length - self.length % page_size

    def page_at(self, offset: int, page_size: int) -> Any:
        """The page at ``offset`` as a dictionary key."""
        if self.bigram:
            return self.tokens[offset : offset + page_size + 1].tobytes()
        return self.tokens[offset] if page_size == 1 else self.tokens[offset : offset + page_size].tobytes()

    def common_len(self, other: Key, offset: int, limit: int, page_size: int) -> int:
        """Units that this key shares with units ``[offset, limit)`` of ``other``, rounded down to whole pages."""
        count = limit - offset
        if count > self.length:
            count = self.length
        extra = 1 if self.bigram and count else 0
        mine, theirs = self.tokens, other.tokens
        raw = count + extra
        if (mine if raw == len(mine) else mine[:raw]) == theirs[offset : offset + raw]:
            return count - count % page_size
        # double the step until a window differs, then halve it: C compares, never a loop over tokens
        low, step = 0, 64
        while True:
            high = min(low + step, raw)
            if mine[low:high] != theirs[offset + low : offset + high]:
                break
            low, step = high, step * 2
        while high - low > 1:
            middle = (low + high) // 2
            if mine[low:middle] == theirs[offset + low : offset + middle]:
                low = middle
            else:
                high = middle
        shared = max(0, low - extra)
        return shared - shared % page_size
