"""Probabilities of the trie against exact fractions and a slow twin; no SGLang, no torch."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.keys import Key
from sglang_plt.policy import make_order
from sglang_plt.probability import BIT, DECAY_VISITS, ONE, Estimator, log2_fixed, prior_weight
from sglang_plt.trie import Node, Trie

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=14)
page_sizes = st.sampled_from([1, 2])


def make_trie(known=(), page_size=1) -> Trie:
    trie = Trie(page_size, make_order("lru"))
    for tokens in known:
        insert(trie, tokens)
    return trie


def insert(trie: Trie, tokens, namespace=None, **kwargs) -> Node:
    key = Key(array("q", tokens), namespace)
    return trie.insert(key, lambda start, stop: range(start, stop), **kwargs)[1]


def find(trie: Trie, tokens, namespace=None) -> Node:
    return trie.match(Key(array("q", tokens), namespace))[1]


def forget(trie: Trie, node: Node) -> None:
    """Evict a leaf and drop its key."""
    if node.slots is not None:
        trie.clear_hot(node)
    trie.remove(node)


def slow_bits(trie: Trie, node: Node) -> int:
    """The estimator by its definition, from counts and children."""
    bits = 0
    for part in trie.path(node):
        parent = part.parent
        ways = [c for c in parent.children.values() if c.key.namespace == part.key.namespace]
        is_root = parent is trie.root
        total = trie.estimator.contexts[part.key.namespace].total if is_root else parent.total
        if is_root or len(ways) > 1 or total > part.weight:
            bits += log2_fixed(total + len(ways) * ONE) - log2_fixed(part.weight)
    return bits


# -- arithmetic -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 40))
def test_logarithm_is_a_floor(n):
    """``2 ** (result / BIT) <= n < 2 ** ((result + 1) / BIT)``, up to what a float can tell."""
    exact = math.log2(n) * BIT
    assert exact - 1 - 1e-6 * exact <= log2_fixed(n) <= exact * (1 + 1e-12)


def test_logarithm_is_pinned():
    values = {1: 0, 2: 65536, 3: 103872, 5: 152169, 7: 183982, 10: 217705, 255: 523917, 1000: 653117, 1 << 50: 50 << 16}
    assert {n: log2_fixed(n) for n in values} == values
    assert all(log2_fixed(n) <= log2_fixed(n + 1) for n in range(1, 5000))
    with pytest.raises(ValueError, match="of 0"):
        log2_fixed(0)


def test_prior_is_at_most_one_visit():
    assert [prior_weight(bits * BIT // 2) for bits in (0, 1, 2, 3, 16, 17, 100)] == [256, 128, 128, 64, 1, 0, 0]
    assert prior_weight(-1) == ONE


# -- the estimator ----------------------------------------------------------------------------------------------------


def test_counts_of_method_c():
    """Three ways from the root after 6 sequences, two below one of them."""
    trie = make_trie([[1, 1], [1, 1], [1, 2], [2], [2], [3]])
    bits = trie.estimator.edge_bits
    log = log2_fixed
    assert bits(find(trie, [1])) == log(9 * ONE) - log(3 * ONE)
    assert bits(find(trie, [3])) == log(9 * ONE) - log(1 * ONE)
    assert bits(find(trie, [1, 1])) == log(5 * ONE) - log(2 * ONE)
    assert trie.estimator.escape_bits(find(trie, [2])) == log(9 * ONE) - log(3 * ONE)
    assert trie.estimator.escape_bits(find(trie, [1, 1])) == log(5 * ONE) - log(2 * ONE)
    assert trie.estimator.path_bits(find(trie, [1, 2])) == bits(find(trie, [1])) + bits(find(trie, [1, 2]))


@given(sequences, page_sizes)
def test_probabilities_add_up(known, page_size):
    """At a branch point the ways on and the unseen have probability 1; elsewhere the one way on has."""
    trie = make_trie(known, page_size)
    trie.check()
    for node in trie.nodes():
        assert trie.estimator.path_bits(node) == slow_bits(trie, node)
        total, kinds, branches = trie.estimator.counts(node.parent, node)
        weights = [child.weight for child in node.parent.children.values()]
        if branches:
            assert sum(weights) == total
            escape = Fraction(kinds * ONE, total + kinds * ONE)
            assert sum(Fraction(w, total + kinds * ONE) for w in weights) + escape == 1
            assert trie.estimator.edge_bits(node) > 0
        else:
            assert weights == [total]
            assert trie.estimator.edge_bits(node) == 0


@given(sequences, st.lists(st.integers(0, 2), max_size=10), page_sizes)
def test_a_split_moves_no_probability(known, other, page_size):
    trie = make_trie(known, page_size)
    before = {node.id: trie.estimator.path_bits(node) for node in trie.nodes()}
    find(trie, other)
    assert {node.id: trie.estimator.path_bits(node) for node in trie.nodes() if node.id in before} == before
    for node in trie.nodes():
        if node.id not in before:
            below = next(iter(node.children.values()))
            assert trie.estimator.path_bits(node) == trie.estimator.path_bits(below)


def test_a_request_counts_once():
    """Prefill in chunks, then the answer: every node on the path was visited once."""
    trie = make_trie()
    insert(trie, range(4))
    insert(trie, range(8), counted_len=4)
    insert(trie, range(8), counted_len=8)
    insert(trie, range(10), counted_len=8)
    assert [node.weight for node in trie.path(find(trie, range(10)))] == [ONE] * 3


@given(sequences, st.randoms(use_true_random=False))
def test_what_is_forgotten_is_unseen_again(known, random):
    trie = make_trie(known)
    while (leaves := [node for node in trie.nodes() if not node.children]) != []:
        leaf = random.choice(leaves)
        parent = leaf.parent
        before = {child.id: trie.estimator.edge_bits(child) for child in parent.children.values()}
        forget(trie, leaf)
        trie.check()
        for child in parent.children.values():
            # one kind of escape less, and the same n: never less probable, never certain
            assert 0 < trie.estimator.edge_bits(child) <= before[child.id] or len(before) == 1
    assert trie.estimator.contexts == {}


def test_counts_are_bounded_and_the_past_fades():
    trie = make_trie([[1]] * DECAY_VISITS)
    context = trie.estimator.contexts[None]
    old, new = find(trie, [1]), insert(trie, [2])
    before = trie.estimator.edge_bits(old)
    for _ in range(3 * DECAY_VISITS):
        insert(trie, [2])
        assert context.total == old.weight + new.weight <= (DECAY_VISITS + 3) * ONE
    assert trie.estimator.edge_bits(new) < BIT < 3 * BIT < trie.estimator.edge_bits(old) - before
    trie.check()


def test_decay_keeps_a_lone_path_certain():
    trie = make_trie([[1, 2, 3]])
    find(trie, [1])
    for _ in range(2 * DECAY_VISITS):
        insert(trie, [1, 2, 3])
    assert trie.estimator.edge_bits(find(trie, [1, 2, 3])) == 0
    trie.check()


def test_decay_of_many_ways_is_seldom():
    """Each halving costs the ways on; it comes once in about half as many visits."""
    trie = make_trie()
    halvings = 0
    context = trie.estimator.context(None)
    last = 0
    for token in range(5 * DECAY_VISITS):
        insert(trie, [token])
        halvings += context.total < last
        last = context.total
    assert halvings < 5
    trie.check()


# -- namespaces -------------------------------------------------------------------------------------------------------


def test_namespaces_share_no_statistic():
    trie = make_trie([[1], [2]])
    before = trie.estimator.path_bits(find(trie, [1]))
    for _ in range(5):
        insert(trie, [1], ("lora", None))
    insert(trie, [3], ("lora", None))
    assert trie.estimator.path_bits(find(trie, [1])) == before
    assert trie.estimator.edge_bits(find(trie, [1], ("lora", None))) == log2_fixed(8 * ONE) - log2_fixed(5 * ONE)
    trie.check()


def test_salted_requests_teach_nothing():
    trie = make_trie([[1], [2]])
    before = trie.estimator.path_bits(find(trie, [1]))
    salted = insert(trie, [1, 2], (None, "salt"))
    insert(trie, [1, 3], (None, "salt"))
    salted = find(trie, [1, 2], (None, "salt"))
    assert [node.weight for node in trie.path(salted)] == [0, 0]
    assert trie.estimator.path_bits(find(trie, [1])) == before
    assert not Estimator.learns((None, "salt"))
    assert not Estimator.learns(("lora", "salt"))
    with pytest.raises(ValueError, match="salted"):
        trie.estimator.path_bits(salted)
    assert trie.estimator.shared_bits(salted, find(trie, [1])) == 0
    trie.check()


# -- the model's own probabilities ------------------------------------------------------------------------------------


def test_a_probable_answer_starts_with_more():
    trie = make_trie([[1]])
    likely = insert(trie, [1, 5, 6], model_bits=lambda start, stop: (stop - start) * BIT // 2)
    unlikely = insert(trie, [1, 7, 8], model_bits=lambda start, stop: 40 * BIT)
    unknown = insert(trie, [1, 9], model_bits=lambda start, stop: None)
    assert [node.weight for node in (likely, unlikely, unknown)] == [ONE + ONE // 2, ONE, ONE]
    assert [node.model_bits for node in (likely, unlikely, unknown)] == [BIT, 40 * BIT, None]
    assert trie.estimator.edge_bits(likely) < trie.estimator.edge_bits(unlikely)
    trie.check()


def test_a_split_shares_the_model_bits():
    trie = make_trie()
    lower = insert(trie, range(3), model_bits=lambda start, stop: 100)
    upper = find(trie, [0])
    assert (upper.model_bits, lower.model_bits) == (33, 67)
    assert upper.weight == lower.weight == upper.total
