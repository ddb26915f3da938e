"""The index against sets of fragments, walls between namespaces, limits, and what removal leaves."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from sglang_plt.similar import Candidate, FragmentIndex
from sglang_plt.similar.fragments import as_tokens
from tests.similar.test_fragments import slow_hashes, slow_winnow

NAMESPACES = (None, ("lora", None), (None, "salt"))
FRAGMENT, WINDOW, MOST = 4, 3, 2


def assert_empty(index: FragmentIndex) -> None:
    assert len(index) == 0
    assert index.num_bytes == 0
    assert not index._items
    assert not index._postings


class IndexMachine(RuleBasedStateMachine):
    """``items`` is item -> (namespace, tokens, fragments that list it)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FragmentIndex(FRAGMENT, WINDOW, MOST)
        self.items: dict[int, tuple[Hashable, list[int], set[int]]] = {}

    def listed(self, namespace: Hashable) -> Counter[int]:
        return Counter(
            fragment for other, _, fragments in self.items.values() if other == namespace for fragment in fragments
        )

    def sampled(self, tokens: list[int]) -> set[int]:
        return set(slow_winnow(slow_hashes(tokens, FRAGMENT), WINDOW))

    tokens = st.lists(st.integers(0, 2), max_size=14) | st.lists(st.integers(0, 2**40), max_size=6)

    @rule(item=st.integers(1, 9), namespace=st.sampled_from(NAMESPACES), tokens=tokens)
    def add(self, item: int, namespace: Hashable, tokens: list[int]) -> None:
        given = np.array(tokens, dtype=np.int64)
        if item in self.items:
            with pytest.raises(ValueError, match=f"item {item} is there already"):
                self.index.add(item, namespace, given)
            return
        listed = self.listed(namespace)
        self.items[item] = namespace, tokens, {part for part in self.sampled(tokens) if listed[part] < MOST}
        self.index.add(item, namespace, given)
        given[:] = -1  # it keeps a copy

    @rule(item=st.integers(1, 9))
    def remove(self, item: int) -> None:
        self.items.pop(item, None)
        self.index.remove(item)

    @precondition(lambda self: len(self.items) > 4)
    @rule()
    def clear(self) -> None:
        self.items.clear()
        self.index.clear()

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=tokens, limit=st.integers(1, 4))
    def find(self, namespace: Hashable, tokens: list[int], limit: int) -> None:
        sampled = self.sampled(tokens)
        shared = [
            (-len(fragments & sampled), item)
            for item, (other, _, fragments) in self.items.items()
            if other == namespace and fragments & sampled
        ]
        expected = [Candidate(item, -count) for count, item in sorted(shared)[:limit]]
        assert self.index.find(namespace, np.array(tokens, dtype=np.int64), limit) == expected

    @invariant()
    def holds_what_was_added(self) -> None:
        assert len(self.index) == len(self.items)
        for item in range(1, 10):
            assert (item in self.index) == (item in self.items)
            if item in self.items:
                assert self.index.tokens(item).tolist() == self.items[item][1]
            else:
                with pytest.raises(KeyError):
                    self.index.tokens(item)

    @invariant()
    def keeps_nothing_else(self) -> None:
        for namespace in NAMESPACES:
            listed = self.listed(namespace)
            postings = self.index._postings.get(namespace, {})
            assert {fragment: len(items) for fragment, items in postings.items()} == dict(listed)
            assert (namespace in self.index._postings) == bool(listed)
        assert self.index._num_fragments == sum(len(postings) for postings in self.index._postings.values())
        assert self.index._num_postings == sum(len(fragments) for _, _, fragments in self.items.values())

    def teardown(self) -> None:
        for item in range(1, 10):
            self.index.remove(item)
        assert_empty(self.index)


def test_index_against_sets() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=150, stateful_step_count=30))


def random_tokens(seed: int, length: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, length)


def test_a_shared_run_is_found_wherever_it_stands() -> None:
    index = FragmentIndex()
    stored = random_tokens(0)
    index.add(7, None, stored)
    for start in range(0, 226, 15):
        for before in (0, 1, 100):
            asked = np.concatenate([random_tokens(1, before), stored[start : start + 31], random_tokens(2, 50)])
            assert [found.item for found in index.find(None, asked)] == [7]
    assert index.find(None, random_tokens(1)) == []


def test_most_shared_first_and_of_equals_the_smaller_item() -> None:
    index = FragmentIndex()
    text = random_tokens(0)
    for item, shared in ((5, 128), (3, 256), (9, 256), (4, 64)):
        index.add(item, None, np.concatenate([text[:shared], random_tokens(item, 256 - shared)]))
    found = index.find(None, text)
    assert [candidate.item for candidate in found] == [3, 9, 5, 4]
    assert found[0].shared == found[1].shared > found[2].shared > found[3].shared >= 1
    assert index.find(None, text, limit=2) == found[:2]


def test_namespaces_are_walls() -> None:
    index = FragmentIndex()
    for item, namespace in enumerate(NAMESPACES, start=1):
        index.add(item, namespace, random_tokens(0))
    for item, namespace in enumerate(NAMESPACES, start=1):
        assert [found.item for found in index.find(namespace, random_tokens(0))] == [item]
    assert index.find("another", random_tokens(0)) == []


def test_the_first_keep_the_places_and_removal_frees_them() -> None:
    index = FragmentIndex(max_per_fragment=2)
    for item in (1, 2, 3):
        index.add(item, None, random_tokens(0))
    assert [found.item for found in index.find(None, random_tokens(0))] == [1, 2]
    index.remove(1)
    index.add(4, None, random_tokens(0))
    assert [found.item for found in index.find(None, random_tokens(0))] == [2, 4]
    assert 3 in index


def test_an_emptied_index_holds_nothing() -> None:
    index = FragmentIndex()
    for item in range(1, 200):
        index.add(item, ("namespace", item % 50), random_tokens(item % 7))
    for item in range(1, 200):
        index.remove(item)
        index.remove(item)
    assert_empty(index)


def test_too_short_for_a_fragment() -> None:
    index = FragmentIndex()
    for item, length in ((1, 0), (2, 15)):
        index.add(item, None, random_tokens(0, length))
        assert index.find(None, random_tokens(0, length)) == []
        assert index.tokens(item).tolist() == random_tokens(0, length).tolist()


def test_tokens_are_narrow_and_read_only() -> None:
    index = FragmentIndex()
    index.add(1, None, np.array([-(2**31), 2**31 - 1]))
    index.add(2, None, np.array([2**31]))
    assert (index.tokens(1).dtype, index.tokens(2).dtype) == (np.int32, np.int64)
    assert as_tokens(index.tokens(1)).tolist() == [-(2**31), 2**31 - 1]
    with pytest.raises(ValueError, match="read-only"):
        index.tokens(1)[0] = 0


@pytest.mark.parametrize("kind", ["random", "relatives", "short", "namespaces"])
def test_num_bytes_is_what_is_allocated(kind: str) -> None:
    """From counts alone, yet within a third; dictionaries double when they grow, so it cannot be exact."""
    length = 20 if kind == "short" else 256
    blocks = [random_tokens(item % 100 if kind == "relatives" else item, length) for item in range(2000)]
    namespaces = [("namespace", item) if kind == "namespaces" else None for item in range(2000)]
    tracemalloc.start()
    try:
        index = FragmentIndex()
        for item, block in enumerate(blocks, start=1):
            index.add(item, namespaces[item - 1], block)
        gc.collect()  # also frees what the interpreter keeps of tuples that are gone
        allocated = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 2 / 3 < index.num_bytes / allocated < 4 / 3


@pytest.mark.parametrize("name", ["fragment", "window", "max_per_fragment"])
def test_wrong_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        FragmentIndex(**{name: 0})


def test_wrong_arguments_are_refused() -> None:
    index = FragmentIndex()
    with pytest.raises(ValueError, match="positive integer, got 0"):
        index.add(0, None, random_tokens(0))
    with pytest.raises(TypeError, match="float64"):
        index.add(1, None, np.zeros(20))
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        index.find(None, random_tokens(0), limit=0)
    assert_empty(index)
