"""Room in the store: whose encoded rows go when others need their bytes."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_plt.node import Node
from sglang_plt.trie import Trie


class _Freed:
    """Counts the bytes that nodes free with their views: a block goes with the last of its views."""

    def __init__(self) -> None:
        self._refs: dict[int, int] = {}  # block -> views that are left

    def __call__(self, node: Node) -> int:
        """Bytes that are free with ``node`` and were not before; once for each node."""
        num_bytes = 0
        for view in node.views:
            block = view.block
            left = self._refs[block.id] = self._refs.get(block.id, block.refs) - 1
            if left == 0:
                num_bytes += block.num_bytes
        return num_bytes


def choose_victims(trie: Trie, num_bytes: int, *, copies: bool) -> list[Node]:
    """Nodes whose views are to go, one after another, so that ``num_bytes`` become free.

    Cold nodes go in eviction order. With ``copies``, where they are not enough, the blocks of hot nodes go as well,
    those last in line for eviction first: nothing is lost but the head start.

    Returns:
        Nothing where all that may go would not be enough: then nothing should go.
    """
    freed = _Freed()
    total = 0

    def size(node: Node) -> int:
        nonlocal total
        found = freed(node)
        total += found
        return found

    victims = trie.in_line(trie.cold_queue, num_bytes, size)
    if total < num_bytes and copies:
        order = trie.order
        for node in sorted(_copies(trie), key=lambda node: (order(node), node.id), reverse=True):
            if total >= num_bytes:
                break
            size(node)
            victims.append(node)
    return victims if total >= num_bytes else []


def _copies(trie: Trie) -> Iterator[Node]:
    """Hot nodes that can be encoded again; pinned ones are about to be read."""
    stack = [trie.root]
    while stack:
        for node in stack.pop().children.values():
            if node.slots is not None:
                stack.append(node)
                if node.views and not (node.lossy or node.pin_count):
                    yield node
