"""Whose blocks go when others need their bytes: shared bytes count once, and nothing goes that frees nothing."""

from __future__ import annotations

from array import array

from sglang_plt.blocks import BlockReference
from sglang_plt.cache.room import choose_victims
from sglang_plt.keys import Key
from sglang_plt.node import Node
from sglang_plt.policy import make_order
from sglang_plt.store import BlockStore
from sglang_plt.trie import Trie


class Tiers:
    """A trie with ``lru``, and nodes with blocks of ten bytes."""

    def __init__(self) -> None:
        self.trie = Trie(1, make_order("lru"))
        self.store = BlockStore(1 << 20)

    def hot(self, *tokens: int) -> Node:
        return self.trie.insert(Key(array("q", tokens)), range)[1]

    def stored(self, node: Node, *references: Node, num_bytes: int = 10, cold: bool = True) -> Node:
        """Give ``node`` a block that refers to those of ``references``."""
        near = [BlockReference(other.views[0].block, ((0, 0, 1),)) for other in references]
        self.store.hold(near)
        self.trie.set_views(node, [self.store.add(len(node), num_bytes, node.start, None, references=near)])
        if cold:
            self.trie.clear_hot(node)
        return node

    def freed(self, nodes: list[Node]) -> int:
        """Drop the views of ``nodes``, in order."""
        return sum(self.store.release(self.trie.clear_views(node)) for node in nodes)

    def choose(self, num_bytes: int, copies: bool = False, **kwargs) -> list[Node]:
        return choose_victims(self.trie, num_bytes, copies=copies, **kwargs)


def test_what_others_need_stays_where_the_rest_is_enough():
    tiers = Tiers()
    centre = tiers.stored(tiers.hot(1))
    plain, near = tiers.stored(tiers.hot(2)), tiers.stored(tiers.hot(3), centre)
    assert tiers.choose(1) == tiers.choose(10) == [plain]
    assert tiers.choose(11) == [plain, near]
    assert tiers.freed([plain, near]) == 20


def test_all_go_where_only_all_are_enough():
    tiers = Tiers()
    centre = tiers.stored(tiers.hot(1))
    plain, near = tiers.stored(tiers.hot(2)), tiers.stored(tiers.hot(3), centre)
    assert tiers.choose(21) == tiers.choose(30) == [centre, plain, near]
    assert tiers.choose(31) == []
    assert tiers.freed([centre, plain, near]) == 30
    assert tiers.store.num_blocks == 0


def test_an_orphan_goes_with_the_last_that_needs_it_and_counts_once():
    tiers = Tiers()
    centre = tiers.stored(tiers.hot(1), num_bytes=50)
    first, second = (tiers.stored(tiers.hot(token), centre, num_bytes=3) for token in (2, 3))
    assert tiers.freed([centre]) == 0
    assert tiers.choose(3) == [first]
    assert tiers.choose(4) == [first, second]
    assert tiers.choose(57) == []
    assert tiers.freed([first, second]) == 56


def test_halves_of_a_block_go_together():
    tiers = Tiers()
    lower = tiers.stored(tiers.hot(1, 2, 3, 4))
    upper = tiers.trie.split(lower, 2)
    other = tiers.stored(tiers.hot(5))
    assert tiers.choose(10) == [lower, upper]
    assert tiers.choose(11) == [lower, upper, other]
    assert tiers.freed([lower, upper]) == 10


def test_a_node_below_one_that_goes_goes_as_well():
    """A leaf whose bytes another block needs frees nothing, but its parent cannot be dropped before it."""
    tiers = Tiers()
    tiers.hot(1, 2)
    leaf = tiers.hot(1, 2, 3)
    parent = leaf.parent
    tiers.stored(leaf)
    tiers.stored(parent)
    other = tiers.hot(9)
    tiers.stored(other, leaf)
    tiers.trie.pin(other)
    assert tiers.choose(10) == [leaf, parent]
    assert tiers.freed([leaf, parent]) == 10
    assert tiers.store.num_orphans == 1


def test_copies_of_hot_nodes_go_last_and_by_the_same_count():
    tiers = Tiers()
    centre = tiers.stored(tiers.hot(1), cold=False)
    near = tiers.stored(tiers.hot(2), centre)
    copy = tiers.stored(tiers.hot(3), centre, cold=False)
    assert tiers.choose(11) == []
    assert tiers.choose(10, copies=True) == [near]
    assert tiers.choose(20, copies=True) == [near, copy]
    assert tiers.choose(30, copies=True) == [near, copy, centre]
    assert tiers.choose(30, copies=True, keep=centre) == []
    assert tiers.choose(20, copies=True, keep=centre) == [near, copy]
    copy.lossy = True
    assert tiers.choose(20, copies=True) == []


def test_hot_copies_that_free_nothing_stay():
    tiers = Tiers()
    held = tiers.stored(tiers.hot(1), cold=False)
    older = tiers.stored(tiers.hot(2), held, cold=False)
    tiers.trie.match(older.key)
    tiers.trie.match(held.key)  # last in line for eviction, so the first whose copy goes
    assert tiers.choose(10, copies=True) == [older]
    assert tiers.choose(11, copies=True) == [held, older]
