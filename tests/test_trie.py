"""The trie alone, against a set of sequences: no SGLang, no torch, slots are plain lists."""

from __future__ import annotations

import itertools
import subprocess
import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.blocks import Block, View, split_views
from sglang_plt.keys import Key
from sglang_plt.policy import EVICTION_POLICIES, EvictionQueue, make_order
from sglang_plt.trie import Trie, chain

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


def key(tokens, **kwargs) -> Key:
    return Key(array("q", tokens), **kwargs)


def insert(trie: Trie, tokens, namespace=None, **kwargs):
    return trie.insert(key(tokens, namespace=namespace), lambda a, b: list(range(a, b)), **kwargs)


def naive_match(known: list[list[int]], tokens: list[int], page_size: int) -> int:
    """Longest page-aligned prefix of ``tokens`` that is a prefix of a known sequence."""
    best = 0
    for other in known:
        shared = 0
        while shared < min(len(other), len(tokens)) and other[shared] == tokens[shared]:
            shared += 1
        best = max(best, min(shared, len(other) - len(other) % page_size))
    return best - best % page_size


@given(sequences, st.sampled_from([1, 2, 4]))
def test_matches_what_was_inserted(known, page_size):
    trie = Trie(page_size, make_order("lru"))
    for index, tokens in enumerate(known):
        before = naive_match(known[:index], tokens, page_size)
        hot, last = trie.match(key(tokens))
        assert hot is last
        assert last.stop == before
        assert insert(trie, tokens)[0] == before
        trie.check()
    for tokens in known:
        node = trie.match(key(tokens))[1]
        assert [slot for part in trie.path(node) for slot in part.slots] == list(range(node.stop))


@given(sequences, st.randoms(use_true_random=False))
def test_counters_survive_locks_and_evictions(known, random):
    trie = Trie(1, make_order("lru"))
    locked = []
    for tokens in known:
        node = insert(trie, tokens)[1]
        if random.random() < 0.5:
            trie.lock(node)
            locked.append(node)
        victim = trie.hot_queue.peek()
        if victim is not None and random.random() < 0.5:
            trie.clear_hot(victim)
        trie.check()
    for node in locked:
        trie.unlock(node)
        trie.check()
    assert trie.protected_tokens == 0
    while (victim := trie.hot_queue.peek()) is not None:
        trie.clear_hot(victim)
    assert trie.evictable_tokens == 0
    while (victim := trie.replay_queue.peek()) is not None:
        trie.remove(victim)
    trie.check()
    assert trie.num_nodes == 0


@given(st.lists(st.integers(0, 2), min_size=2, max_size=20), st.integers(1, 19), st.sampled_from([1, 2, 4]))
def test_common_len_of_bigrams(tokens, cut, page_size):
    """Bigram keys agree with a list of pairs."""
    other = [*tokens[:cut], 3, *tokens[cut:]]
    pairs = [list(itertools.pairwise(ids)) for ids in (tokens, other)]
    shared = 0
    while shared < min(map(len, pairs)) and pairs[0][shared] == pairs[1][shared]:
        shared += 1
    mine, theirs = key(tokens, bigram=True), key(other, bigram=True)
    assert mine.common_len(theirs, 0, len(theirs), page_size) == shared - shared % page_size


@given(st.lists(st.integers(0, 1), min_size=1, max_size=600), st.integers(0, 600))
def test_common_len_of_long_keys(tokens, at):
    other = list(tokens)
    if at < len(other):
        other[at] = 7
    expected = min(at, len(tokens))
    assert key(tokens).common_len(key(other), 0, len(other), 1) == expected


def test_split_views_keeps_bytes_and_counts_references():
    block, other = Block(1, 10, 100, 0, refs=1), Block(2, 5, 50, 10, refs=1)
    left, right = split_views([View(block, 2, 10), View(other, 0, 5)], 3)
    assert left == [View(block, 2, 5)]
    assert right == [View(block, 5, 10), View(other, 0, 5)]
    assert (block.refs, other.refs) == (2, 1)
    left, right = split_views(right, 5)
    assert (left, right) == ([View(block, 5, 10)], [View(other, 0, 5)])
    assert (block.refs, other.refs) == (2, 1)


def test_splits_are_told_to_all_that_listen():
    heard: list = []
    first, second = (lambda *split, n=n: heard.append((n, split)) for n in (1, 2))
    assert chain(None, None) is None
    assert chain(None, first) is first
    trie = Trie(1, make_order("lru"))
    trie.on_split = chain(first, None, second)
    node = insert(trie, [1, 2, 3, 4])[1]
    upper = trie.split(node, 3)
    assert heard == [(1, (upper, node, 3)), (2, (upper, node, 3))]


def test_split_keeps_statistics_and_order():
    trie = Trie(1, make_order("lfu"))
    insert(trie, [1, 2, 3, 4], priority=2)
    insert(trie, [1, 2, 3, 4])
    node = insert(trie, [1, 2, 9])[1]
    upper = node.parent
    assert (upper.hit_count, upper.priority, upper.start, len(upper)) == (3, 2, 0, 2)
    assert trie.hot_queue.peek() is node
    trie.check()


@pytest.mark.parametrize("name", EVICTION_POLICIES)
@settings(max_examples=20)
@given(data=st.data())
def test_queue_is_a_sorted_list(name, data):
    """The lazy heap against sorting, under touches and removals."""
    order = make_order(name)
    trie = Trie(1, order)
    nodes = [insert(trie, [i, i, i], priority=i % 3)[1] for i in range(data.draw(st.integers(1, 8)))]
    for _ in range(data.draw(st.integers(0, 30))):
        node = data.draw(st.sampled_from(nodes))
        trie.match(node.key)
    expected = sorted(nodes, key=lambda node: (order(node), node.id))
    assert trie.in_line(trie.hot_queue, 10**9) == expected
    for node in expected:
        assert trie.hot_queue.peek() is node
        trie.clear_hot(node)
    assert trie.hot_queue.peek() is None


def test_queue_stays_small():
    queue = EvictionQueue(make_order("lru"))
    trie = Trie(1, make_order("lru"))
    node = insert(trie, [1])[1]
    node.queue.discard(node)
    for _ in range(10_000):
        queue.add(node)
    assert len(queue._heap) < 200


@pytest.mark.parametrize(
    ("name", "options"), [("tlru", None), ("lru", {"x": 1}), ("slru", {"protected_threshold": "2"})]
)
def test_wrong_policies_are_refused(name, options):
    with pytest.raises(ValueError, match=name):
        make_order(name, options)


def test_slru_takes_its_threshold():
    trie = Trie(1, make_order("slru", {"protected_threshold": 3}))
    for _ in range(3):
        old = insert(trie, [1, 1])[1]
    young = insert(trie, [2, 2])[1]
    assert trie.in_line(trie.hot_queue, 99) == [young, old]


def test_needs_no_torch():
    code = "import sys, sglang_plt.trie, sglang_plt.config; assert not {'torch', 'sglang', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
