"""Snapshots say what the trie holds, in a bounded number of rows, and no content that was not asked for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.blocks import Block, View
from sglang_plt.clusters import Clusters
from sglang_plt.snapshot import TIERS, TreeSnapshot
from sglang_plt.trie import Trie
from tests.test_clusters import slow_clusters
from tests.test_probability import find, insert, make_trie

SALTED = (None, "salt")


def snapshot(trie: Trie, delta: float = 3.0, **kwargs):
    return json.loads(json.dumps(TreeSnapshot(Clusters(trie, delta), **kwargs).plain()))


def totals(parts) -> dict[str, int]:
    return {tier: sum(part["tokens"][tier] for part in parts) for tier in TIERS}


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=12),
    st.integers(1, 30),
    st.sampled_from([0.5, 2.0, 9.0]),
)
def test_nothing_is_lost(known, max_nodes, delta):
    """Rows and sums of what is hidden add up to the trie, whatever the limit; clusters to all but the salted."""
    trie = make_trie(known)
    insert(trie, [7, 8], SALTED)
    for node in [node for node in trie.nodes() if not node.children][::2]:
        trie.clear_hot(node)
    tree = snapshot(trie, delta, max_nodes=max_nodes)
    rows = tree["nodes"]
    assert len(rows) <= max_nodes
    hidden = [tree["hidden"], *(row["hidden"] for row in rows if row["hidden"] is not None)]
    assert sum(row["nodes"] for row in rows) + sum(part["nodes"] for part in hidden) == trie.num_nodes
    shown = {tier: sum(row["len"] for row in rows if row["tier"] == tier) for tier in TIERS}
    left_out = totals(hidden)
    hot = trie.evictable_tokens + trie.protected_tokens
    assert tree["tokens"] == {"hot": hot, "cold": trie.cold_tokens, "replay": trie.replay_tokens}
    assert {tier: shown[tier] + left_out[tier] for tier in TIERS} == tree["tokens"]
    salted = sum(len(node) for node in trie.nodes() if node.key.namespace == SALTED)
    assert sum(totals(tree["clusters"]).values()) == sum(tree["tokens"].values()) - salted
    expected = slow_clusters(trie, int(delta * (1 << 16)))
    assert tree["num_clusters"] == len(expected)
    assert sorted(c["members"] for c in tree["clusters"]) == sorted(len(members) for members in expected.values())


def test_rows_come_parents_first_and_the_largest_before():
    trie = make_trie([[1, 2], [1, 3, 3, 3], [5] * 10])
    rows = snapshot(trie)["nodes"]
    assert [(row["start"], row["len"], row["parent"]) for row in rows] == [
        (0, 10, None),
        (0, 1, None),
        (1, 3, rows[1]["id"]),
        (1, 1, rows[1]["id"]),
    ]
    first = snapshot(trie, max_nodes=2)
    assert first["nodes"][1]["hidden"] == {"nodes": 2, "tokens": {"hot": 4, "cold": 0, "replay": 0}}
    assert snapshot(trie, max_nodes=1)["hidden"]["nodes"] == 3


def test_a_run_of_nodes_is_one_row():
    trie = make_trie([range(9)])
    for length in (3, 6):
        find(trie, range(length))
    (row,) = snapshot(trie)["nodes"]
    assert (row["nodes"], row["len"], row["centroid"]) == (3, 9, True)
    last = find(trie, range(9))
    trie.set_views(last, [View(Block(1, 3, 1, 6, refs=1), 0, 3)])
    trie.clear_hot(last)
    rows = snapshot(trie)["nodes"]
    assert [(row["tier"], row["nodes"]) for row in rows] == [("hot", 2), ("cold", 1)]


def test_numbers_are_the_estimators():
    trie = make_trie([[1, 1], [1, 1], [1, 2], [2]])
    row = next(row for row in snapshot(trie)["nodes"] if row["start"] == 1 and row["visits"] == 2)
    node = find(trie, [1, 1])
    assert row["path_bits"] == pytest.approx(trie.estimator.path_bits(node) / (1 << 16), abs=1e-3)
    assert row["edge_bits"] == pytest.approx(trie.estimator.edge_bits(node) / (1 << 16), abs=1e-3)


def test_content_and_names_stay_inside():
    trie = make_trie([[4242] * 5])
    insert(trie, [4343] * 5, ("secret-adapter", None))
    insert(trie, [4444] * 5, (None, "secret-salt"))
    said = json.dumps(snapshot(trie))
    assert not any(word in said for word in ("4242", "4343", "4444", "secret"))
    asked = snapshot(trie, token_preview=3)
    assert sorted(row.get("tokens", []) for row in asked["nodes"]) == [[], [4242] * 3, [4343] * 3]
    assert "secret" not in json.dumps(asked)
    salted = next(row for row in asked["nodes"] if "tokens" not in row)
    assert (salted["path_bits"], salted["visits"], salted["cluster"]) == (None, None, None)
    assert (asked["namespaces"], asked["salted_namespaces"]) == (3, 1)


def test_an_empty_trie():
    tree = snapshot(make_trie())
    assert (tree["nodes"], tree["clusters"], tree["num_nodes"]) == ([], [], 0)
