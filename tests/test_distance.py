"""The similarity ``shared_bits`` and the ultrametric ``distance`` on random tries."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.probability import BIT, ONE, common_prefix
from sglang_plt.trie import Node, Trie
from tests.test_probability import find, insert, make_trie, page_sizes, sequences


def tokens_of(trie: Trie, node: Node) -> list[int]:
    return [token for part in trie.path(node) for token in part.key.tokens]


def shared_len(s: list[int], t: list[int], page_size: int) -> int:
    count = 0
    while count < min(len(s), len(t)) and s[count] == t[count]:
        count += 1
    return count - count % page_size


@given(sequences, page_sizes)
def test_common_prefix_is_that_of_the_sequences(known, page_size):
    trie = make_trie(known, page_size)
    nodes = [trie.root, *trie.nodes()]
    for s in nodes:
        for t in nodes:
            expected = shared_len(tokens_of(trie, s), tokens_of(trie, t), page_size)
            assert common_prefix(s, t).stop == expected


@settings(max_examples=60)
@given(sequences, page_sizes)
def test_distance_is_an_ultrametric(known, page_size):
    trie = make_trie(known, page_size)
    nodes = list(trie.nodes())[:9]
    distance, shared = trie.estimator.distance, trie.estimator.shared_bits
    for a in nodes:
        assert distance(a, a) == 0
        for b in nodes:
            assert distance(a, b) == distance(b, a)
            assert shared(a, b) == shared(b, a)
            assert (distance(a, b) == 0) == (a is b)
            assert distance(a, b) <= 1
            for c in nodes:
                assert distance(a, c) <= max(distance(a, b), distance(b, c))
                if len({a.id, b.id, c.id}) == 3:
                    assert shared(a, c) >= min(shared(a, b), shared(b, c))


@given(sequences, st.lists(st.integers(3, 5), min_size=1, max_size=6))
def test_monotone_under_unrelated_prefixes(known, unrelated):
    """What is shared becomes less probable, hence more telling, when something else is served."""
    trie = make_trie(known)
    nodes = list(trie.nodes())
    pairs = [(s, t) for s in nodes for t in nodes]
    before = [(trie.estimator.shared_bits(s, t), trie.estimator.distance(s, t)) for s, t in pairs]
    insert(trie, unrelated)
    for (s, t), (bits, distance) in zip(pairs, before, strict=True):
        assert trie.estimator.shared_bits(s, t) >= bits
        assert trie.estimator.distance(s, t) <= distance


def test_the_printed_metric_is_none():
    """``d(s, t) = -log2 P(s ^ t)`` as printed: a sequence is not at distance 0 from itself, and a detour is shorter."""
    trie = make_trie([[1, 1], [1, 2], [2]])
    a, b, c = find(trie, [1, 1]), find(trie, [2]), find(trie, [1, 2])
    printed = trie.estimator.shared_bits
    assert printed(a, a) > 0
    assert printed(a, c) > printed(a, b) + printed(b, c) == 0
    distance = trie.estimator.distance
    assert distance(a, a) == 0
    assert distance(a, c) < max(distance(a, b), distance(b, c)) == 1


def test_distance_never_underflows():
    trie = make_trie([range(100)])
    for length in range(1, 100):
        find(trie, range(length)).total = ONE << 40  # much was served and forgotten
    deep = find(trie, range(99))
    assert trie.estimator.path_bits(deep) > 1100 * BIT
    assert trie.estimator.distance(deep, find(trie, range(100))) > 0
