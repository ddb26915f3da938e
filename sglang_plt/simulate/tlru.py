"""SGLang's ``tlru`` over our nodes: tail-optimised LRU (Zhang et al., arXiv:2510.15152)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_plt.node import Node


class TlruOrder:
    """What the time to first token of the next turn can do without goes first, then the least recently used.

    As ``TLRUStrategy`` of SGLang 0.5.23: a branch whose deepest node ever ended at ``history`` needs ``history +
    next_prompt - threshold`` tokens in the cache; nodes wholly behind that are free to go.

    Args:
        threshold: tokens whose prefill fits the time budget.
        next_prompt: tokens that the next turn is expected to add.
        unit_tokens: tokens of a unit of the trie's keys.
    """

    def __init__(self, threshold: int, next_prompt: int = 0, unit_tokens: int = 1):
        self._slack = (threshold - next_prompt) // unit_tokens
        self._history: dict[int, int] = {}

    def __call__(self, node: Node) -> tuple[int, int]:
        needed = max(0, max(self._history.get(node.id, 0), node.stop) - self._slack)
        return (-1 if node.start >= needed else 0, node.last_access)

    def on_split(self, upper: Node, lower: Node, length: int) -> None:
        """As ``Trie.on_split``."""
        self._history[upper.id] = max(self._history.get(lower.id, 0), lower.stop)

    def observe(self, end: Node, matched_len: int, output_len: int) -> None:
        """A request ended in ``end``: raise the depth of its branch."""
        depth, walk = end.stop, end
        while walk.parent is not None and self._history.get(walk.id, 0) < depth:
            self._history[walk.id] = depth
            walk = walk.parent
