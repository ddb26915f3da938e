"""Clusters and centroids, kept incrementally, against the same recomputed from scratch."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_plt import probability
from sglang_plt.blocks import Block, View
from sglang_plt.clusters import Cluster, Clusters
from sglang_plt.config import PLTConfig
from sglang_plt.node import Node
from sglang_plt.probability import BIT
from sglang_plt.trie import Trie
from tests.test_probability import find, insert, make_trie

NAMESPACES = (None, ("lora", None), (None, "salt"))


def slow_clusters(trie: Trie, delta: int) -> dict[Cluster, list[tuple[int, Node]]]:
    """Cluster -> (bits from the empty prefix, node) of its members, from every path of the trie."""
    found: dict[Cluster, list[tuple[int, Node]]] = {}
    for node in trie.nodes():
        namespace = node.key.namespace
        if not trie.estimator.learns(namespace):
            continue
        cut = next((part for part in trie.path(node) if trie.estimator.path_bits(part) >= delta), None)
        members = found.setdefault(Cluster(namespace, cut), [])
        found.setdefault(Cluster(namespace, None), [])
        if node.resident and not any(child.resident for child in node.children.values()):
            members.append((trie.estimator.path_bits(node), node))
    return found


def check(trie: Trie, clusters: Clusters) -> None:
    expected = slow_clusters(trie, clusters.delta)
    assert set(clusters.all()) == set(expected)
    for cluster, members in expected.items():
        centroid = clusters.centroid(cluster)
        if not members:
            assert centroid is None
            continue
        assert centroid is not None
        assert (trie.estimator.path_bits(centroid), centroid) in members
        assert trie.estimator.path_bits(centroid) == min(bits for bits, _ in members)
        for _, member in members:
            assert clusters.cluster_of(member) == cluster


class Incremental(RuleBasedStateMachine):
    """Requests come, nodes are split, encoded, evicted and forgotten, counts decay; questions come at any time."""

    @initialize(delta=st.sampled_from([0.5, 1.0, 2.0, 3.0, 6.0]), eager=st.booleans())
    def start(self, delta: float, eager: bool) -> None:
        self.eager = eager
        self.trie = make_trie()
        self.clusters = Clusters(self.trie, delta)

    @rule(
        tokens=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        namespace=st.sampled_from(NAMESPACES),
        times=st.sampled_from([1, 1, 3, 12]),
        model=st.none() | st.integers(0, 9 * BIT),
    )
    def serve(self, tokens, namespace, times, model) -> None:
        for _ in range(times):
            insert(self.trie, tokens, namespace, model_bits=lambda start, stop: model)

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=8), namespace=st.sampled_from(NAMESPACES))
    def match(self, tokens, namespace) -> None:
        find(self.trie, tokens, namespace)

    @precondition(lambda self: self.trie.hot_queue.peek() is not None)
    @rule(data=st.data(), keep=st.booleans())
    def evict(self, data, keep: bool) -> None:
        leaves = [n for n in self.trie.nodes() if n.hot and not n.hot_children and (keep or not n.resident_children)]
        if not leaves:
            return
        node = data.draw(st.sampled_from(leaves))
        if keep and not node.views:
            self.trie.set_views(node, [View(Block(node.id, len(node), 1, node.start, refs=1), 0, len(node))])
        elif not keep and node.views:
            self.trie.clear_views(node)
        self.trie.clear_hot(node)

    @precondition(lambda self: self.trie.cold_tokens)
    @rule(data=st.data(), restore=st.booleans())
    def leave_the_cold_tier(self, data, restore: bool) -> None:
        cold = [n for n in self.trie.nodes() if n.cold and (n.parent.hot if restore else not n.resident_children)]
        node = data.draw(st.sampled_from(cold))
        if restore:
            self.trie.set_hot(node, range(len(node)), lossy=False)
        else:
            self.trie.clear_views(node)

    @precondition(lambda self: self.trie.replay_queue.peek() is not None)
    @rule()
    def forget(self) -> None:
        self.trie.remove(self.trie.replay_queue.peek())

    @rule(data=st.data())
    def ask(self, data) -> None:
        """Some centroids are settled while others stay marked."""
        known = sorted(self.clusters.all(), key=lambda cluster: -1 if cluster.root is None else cluster.root.id)
        if known:
            self.clusters.centroid(data.draw(st.sampled_from(known)))

    @rule()
    def compare(self) -> None:
        check(self.trie, self.clusters)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "trie"):
            self.trie.check()
            if self.eager:
                check(self.trie, self.clusters)

    def teardown(self) -> None:
        if hasattr(self, "trie"):
            check(self.trie, self.clusters)


@pytest.mark.parametrize("decay_visits", [4096, 8])
@pytest.mark.parametrize("slack", [64, 0])
def test_incremental_is_from_scratch(decay_visits: int, slack: int, monkeypatch: pytest.MonkeyPatch):
    """``slack`` 0 makes heaps and marks overflow."""
    monkeypatch.setattr(probability, "DECAY_FROM", decay_visits * probability.ONE)
    monkeypatch.setattr("sglang_plt.trie.DECAY_FROM", decay_visits * probability.ONE)
    monkeypatch.setattr("sglang_plt.clusters._SLACK", slack)
    run_state_machine_as_test(
        Incremental,
        settings=settings(
            max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def sessions(count: int, turns: int = 1) -> Trie:
    """Equal sessions: one preamble, a header of their own, and turns that extend it."""
    return make_trie([[7] * 50 + [1000 + s] * (10 + t) for t in range(turns) for s in range(count)])


@pytest.mark.parametrize("turns", [1, 4])
def test_equal_sessions_are_one_cluster_by_default(turns: int):
    """32 sessions at 5 bits (and at 6 when each was seen once): the guide's 4.0 takes every one for itself."""
    trie = sessions(32, turns)
    leaves = [node for node in trie.nodes() if not node.children]
    assert all(5 * BIT < trie.estimator.path_bits(leaf) < 6.1 * BIT for leaf in leaves)
    together = Clusters(trie, PLTConfig().delta_threshold)
    assert len({together.cluster_of(leaf) for leaf in leaves}) == 1
    apart = Clusters(trie, 4.0)
    assert len({apart.cluster_of(leaf) for leaf in leaves}) == 32


@pytest.mark.parametrize("count", [32, 128, 512, 2048])
def test_default_leaves_few_sessions_alone(count: int):
    """The measurement behind the default: members with a member of another session in their cluster."""
    random, trie = Random(count), make_trie()
    preambles = [min(3, int(random.expovariate(1))) for _ in range(count)]
    histories = [[100 + preambles[s]] * 20 + [10_000 + s] * 4 for s in range(count)]
    for _ in range(4):
        for history in histories:
            history += [20_000 + random.randrange(10**6)] * 4
            insert(trie, history)
            if random.random() < 0.1:
                insert(trie, [*history[:-2], 3])
    members = [node for node in trie.nodes() if not node.children]
    session = {node: next(t for part in trie.path(node) for t in part.key.tokens if t >= 10_000) for node in members}

    def share(delta: float) -> float:
        clusters = Clusters(trie, delta)
        found: dict[Cluster, set[int]] = {}
        for node in members:
            found.setdefault(clusters.cluster_of(node), set()).add(session[node])
        return sum(len(found[clusters.cluster_of(node)]) > 1 for node in members) / len(members)

    assert share(PLTConfig().delta_threshold) > 0.9
    assert share(4.0) < 0.1


def test_centroid_is_the_most_probable_leaf_not_the_widest_road():
    trie = make_trie([[1, token] for token in range(10)] + [[2, 2]] * 5)
    clusters = Clusters(trie, 100.0)
    assert clusters.centroid(Cluster(None, None)) is find(trie, [2, 2])
    for _ in range(9):
        insert(trie, [1, 3])
    assert clusters.centroid(Cluster(None, None)) is find(trie, [1, 3])


def test_evicting_the_centroid_makes_another():
    trie = make_trie([[1, 1], [1, 1], [1, 2], [2]])
    clusters = Clusters(trie, 100.0)
    whole = Cluster(None, None)
    best = clusters.centroid(whole)
    assert best is find(trie, [1, 1])
    trie.clear_hot(best)
    assert clusters.centroid(whole) is find(trie, [2])


def test_an_update_costs_a_path(monkeypatch: pytest.MonkeyPatch):
    """One more request for one of 2000 sessions settles its path, not its siblings."""
    trie = sessions(2000)
    clusters = Clusters(trie, 100.0)
    clusters.centroid(Cluster(None, None))
    settled = []
    update = clusters._update
    monkeypatch.setattr(
        clusters, "_update", lambda holder, namespace: (settled.append(holder), update(holder, namespace))
    )
    insert(trie, [7] * 50 + [1000] * 30)
    assert clusters.centroid(Cluster(None, None)) is find(trie, [7] * 50 + [1000] * 30)
    assert len(settled) == 4  # the leaf, the session, the preamble, the empty prefix


def test_namespaces_have_clusters_of_their_own():
    trie = make_trie([[1], [2]])
    insert(trie, [1], ("lora", None))
    salted = insert(trie, [1], (None, "salt"))
    clusters = Clusters(trie, 8.0)
    assert set(clusters.all()) == {Cluster(None, None), Cluster(("lora", None), None)}
    assert clusters.cluster_of(salted) is None
    assert clusters.centroid(Cluster(("lora", None), None)) is find(trie, [1], ("lora", None))
    assert clusters.centroid(Cluster(("other", None), None)) is None


def test_clear_forgets():
    trie = make_trie([[1], [2]])
    clusters = Clusters(trie, 8.0)
    clusters.centroid(Cluster(None, None))
    trie.clear()
    assert list(clusters.all()) == []
    insert(trie, [5])
    check(trie, clusters)


def test_delta_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        Clusters(make_trie(), 0)
