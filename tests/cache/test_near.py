"""Which stored blocks a block about to be stored may refer to, from tokens, dependants and counts alone."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from sglang_plt.blocks import BLOCK_TOKENS, Block, BlockReference
from sglang_plt.cache import near
from sglang_plt.cache.near import NearBlocks
from sglang_plt.cache.stats import CacheStats
from sglang_plt.keys import Key
from sglang_plt.node import Node

RANDOM = np.random.default_rng(1)


def random_tokens(count: int = BLOCK_TOKENS) -> array:
    return array("q", RANDOM.integers(0, 100_000, count).tolist())


class Stored:
    """A :class:`NearBlocks`, and what was added to it."""

    def __init__(self) -> None:
        self.stats = CacheStats()
        self.near = NearBlocks(self.stats)
        self.next_id = 0

    def add(
        self, tokens: array, namespace=None, weight: int = 0, dependants: int = 0, references: tuple = ()
    ) -> tuple[Block, Node]:
        self.next_id += 1
        block = Block(self.next_id, len(tokens), 1, 0, refs=1, dependants=dependants, references=references)
        node = Node(self.next_id, None, Key(tokens, namespace), 0, 0, 0)
        node.weight = weight
        self.near.add(block, node, tokens)
        return block, node

    def find(self, tokens: array, namespace=None) -> list[tuple[int, tuple[tuple[int, int, int], ...]]]:
        return [(found.block.id, found.stretches) for found in self.near.find(namespace, tokens)]


@pytest.fixture
def stored() -> Stored:
    return Stored()


# -- what is found ----------------------------------------------------------------------------------------------------


def test_tokens_that_shifted_meet_two_blocks(stored):
    text = random_tokens(2 * BLOCK_TOKENS)
    stored.add(text[:BLOCK_TOKENS])
    stored.add(text[BLOCK_TOKENS:])
    assert stored.find(text[100:356]) == [(1, ((100, 0, 156),)), (2, ((0, 156, 100),))]
    assert stored.find(text[200:456]) == [(2, ((0, 56, 200),)), (1, ((200, 0, 56),))]
    assert (stored.stats.near_candidates, stored.stats.near_accepted) == (4, 4)
    assert stored.stats.seconds["align"] > 0


def test_an_edit_leaves_two_stretches(stored):
    text = random_tokens()
    stored.add(text)
    assert stored.find(text[:100] + random_tokens(3) + text[101:254]) == [(1, ((0, 0, 100), (101, 103, 153)))]


def test_no_more_than_four_references(stored):
    lengths = (40, 44, 48, 36, 43, 45)
    parts = [random_tokens(length) for length in lengths]
    for part in parts:
        stored.add(random_tokens(50) + part)
    found = stored.find(array("q", [token for part in parts for token in part]))
    assert [item for item, _ in found] == [2, 3, 1, 5]  # each the oldest of those within an eighth of the best
    assert [length for _, ((_, _, length),) in found] == [44, 48, 40, 43]


@pytest.mark.parametrize(("rows", "shared", "accepted"), [(256, 63, 0), (256, 64, 1), (40, 31, 0), (40, 32, 1)])
def test_a_fourth_of_the_rows_and_two_runs_at_least(stored, rows, shared, accepted):
    text = random_tokens(shared)
    stored.add(random_tokens(20) + text)
    assert len(stored.find(text + random_tokens(rows - shared))) == accepted
    assert (stored.stats.near_candidates, stored.stats.near_accepted) == (1, accepted)


@pytest.mark.parametrize(("left", "accepted"), [(15, 1), (16, 2)])
def test_what_others_left_must_be_a_run_as_well(stored, left, accepted):
    text = random_tokens()
    stored.add(text[:200])
    stored.add(text[160 : 200 + left])
    found = stored.find(text[: 200 + left] + random_tokens(56 - left))
    assert found == [(1, ((0, 0, 200),)), (2, ((40, 200, left),))][:accepted]


def test_equal_tokens_at_two_places_are_taken_once(stored):
    part = random_tokens(60)
    stored.add(part + random_tokens(20) + part)
    rows = np.zeros(150, int)
    for _, stretches in stored.find(part + random_tokens(30) + part):
        for _, row, length in stretches:
            rows[row : row + length] += 1
    assert rows.max() == 1
    assert rows.sum() == 120


# -- which of those that are alike ------------------------------------------------------------------------------------


def test_of_equals_the_one_in_use_until_another_is_twice_as_probable(stored):
    text = random_tokens()
    stored.add(text, weight=10)
    (used, used_node), (likely, node) = stored.add(text, weight=10), stored.add(text, weight=20)
    assert stored.find(text)[0][0] == 1, "nobody refers to any: the oldest"
    used.dependants = 1
    assert stored.find(text)[0][0] == used.id
    node.weight = 21
    assert stored.find(text)[0][0] == likely.id
    used_node.weight = 11
    assert stored.find(text)[0][0] == used.id


def test_one_that_covers_more_is_better_than_one_in_use(stored):
    text = random_tokens()
    used, _ = stored.add(text[:223], dependants=3)
    stored.add(text)
    assert [item for item, _ in stored.find(text)] == [2]
    stored.near.forget(used)
    used, _ = stored.add(text[:224], dependants=3)  # seven eighths are nearly as good
    assert stored.find(text) == [(3, ((0, 0, 224),)), (2, ((224, 224, 32),))]


# -- walls ------------------------------------------------------------------------------------------------------------


def test_a_difference_is_never_offered(stored):
    text = random_tokens()
    centre, _ = stored.add(text[:200])
    stored.add(text, references=(BlockReference(centre, ((0, 0, 200),)),))
    assert len(stored.near) == 1
    assert [item for item, _ in stored.find(text)] == [1]


def test_namespaces_are_walls(stored):
    text = random_tokens()
    names = [None, (None, "a"), (None, "b"), ("a", None), ("lora", "a")]
    for name in names:
        assert stored.find(text, name) == []
        assert stored.stats.near_candidates == 0
    for name in names:
        assert stored.find(text, name) == []
        stored.add(text, name)
    assert stored.stats.near_candidates == 0
    assert [stored.find(text, name)[0][0] for name in names] == [1, 2, 3, 4, 5]
    assert stored.stats.near_candidates == 5


# -- cost and memory --------------------------------------------------------------------------------------------------


def test_nothing_is_aligned_with_what_shares_nothing(stored, monkeypatch):
    for _ in range(200):
        stored.add(random_tokens())
    monkeypatch.setattr(near, "align", lambda *_: pytest.fail("unrelated tokens were aligned"))
    for _ in range(20):
        assert stored.find(random_tokens()) == []
    assert stored.stats.near_candidates == 0


def test_no_more_than_eight_are_aligned(stored):
    text = random_tokens()
    for _ in range(30):
        stored.add(text + random_tokens(10))
    stored.find(text)
    assert stored.stats.near_candidates == 8


def test_memory_is_that_of_what_is_offered(stored):
    text = random_tokens()
    first, _ = stored.add(text)
    one = stored.near.num_bytes
    blocks = [first] + [stored.add(random_tokens())[0] for _ in range(99)]
    assert 80 * one < stored.near.num_bytes < 125 * one
    assert one < 32 * BLOCK_TOKENS
    for block in blocks[::2]:
        stored.near.forget(block)
        stored.near.forget(block)
    assert stored.find(text) == []
    assert len(stored.near) == 50
    for block in blocks[1::2]:
        stored.near.forget(block)
    assert (len(stored.near), stored.near.num_bytes) == (0, 0)
    stored.add(text)
    stored.near.clear()
    assert (len(stored.near), stored.near.num_bytes, stored.find(text)) == (0, 0, [])
    stored.near.forget(first)
