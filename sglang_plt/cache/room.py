"""Room in the store: whose encoded rows go when others need their bytes."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_plt.blocks import Block
from sglang_plt.node import Node
from sglang_plt.trie import Trie


class _Freed:
    """Counts the bytes that nodes free with their views: a block goes with the last of what needs it."""

    def __init__(self) -> None:
        self._needed: dict[int, int] = {}  # block -> views and dependants that are left

    def __call__(self, node: Node) -> int:
        """Bytes that are free with ``node`` and were not before; once for each node."""
        return sum(self._without_one(view.block) for view in node.views)

    def _without_one(self, block: Block) -> int:
        left = self._needed[block.id] = self._needed.get(block.id, block.refs + block.dependants) - 1
        if left:
            return 0
        return block.num_bytes + sum(self._without_one(reference.block) for reference in block.references)


def choose_victims(trie: Trie, num_bytes: int, *, copies: bool, keep: Node | None = None) -> list[Node]:
    """Nodes whose views are to go, one after another, so that ``num_bytes`` become free.

    Cold nodes go in eviction order. With ``copies``, where they are not enough, the blocks of hot nodes go as well,
    those last in line for eviction first: nothing is lost but the head start. ``keep`` keeps its own.

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
        for node in sorted(_copies(trie, keep), key=lambda node: (order(node), node.id), reverse=True):
            if total >= num_bytes:
                break
            size(node)
            victims.append(node)
    return _without_idle(victims, num_bytes) if total >= num_bytes else []


def _without_idle(victims: list[Node], num_bytes: int) -> list[Node]:
    """Leave out those whose bytes other blocks need, where the rest is enough: dropping them would win nothing."""
    freed = _Freed()
    idle = {node.id for node in victims if not freed(node)}
    for node in victims:
        if node.id not in idle:  # its whole subtree has to go first
            idle -= {below.id for below in _cold_below(node)}
    if not idle:
        return victims
    kept, freed = [node for node in victims if node.id not in idle], _Freed()
    return kept if sum(map(freed, kept)) >= num_bytes else victims


def _cold_below(node: Node) -> Iterator[Node]:
    stack = [node] if node.cold else []
    while stack:
        for child in stack.pop().children.values():
            if child.cold:
                stack.append(child)
                yield child


def _copies(trie: Trie, keep: Node | None) -> Iterator[Node]:
    """Hot nodes that can be encoded again; a pin is for the cold nodes below them."""
    stack = [trie.root]
    while stack:
        for node in stack.pop().children.values():
            if node.slots is not None:
                stack.append(node)
                if node.views and not node.lossy and node is not keep:
                    yield node
