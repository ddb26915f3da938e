"""The slow twin of the trie's bookkeeping: recompute everything from the nodes and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_plt.keys import Namespace
    from sglang_plt.node import Node
    from sglang_plt.node_tree import NodeTree
    from sglang_plt.queues import NodeQueue


def check_trie(trie: NodeTree) -> None:
    """Raise AssertionError on the first invariant or counter of ``trie`` that does not hold."""
    counts = {"hot": 0, "cold": 0, "replay": 0}
    protected = num_nodes = 0
    queued: dict[str, int] = {"hot": 0, "cold": 0, "replay": 0}
    for node in trie.nodes():
        _check_node(trie, node)
        num_nodes += 1
        counts[node.tier] += len(node)
        protected += len(node) if node.lock_count else 0
        expected = _expected_queue(trie, node)
        assert node.queue is expected, f"{node} is in the wrong queue"
        if expected is not None:
            queued[node.tier] += 1
    assert num_nodes == trie.num_nodes, (num_nodes, trie.num_nodes)
    assert trie.protected_tokens == protected, (trie.protected_tokens, protected)
    assert trie.evictable_tokens + trie.protected_tokens == counts["hot"]
    assert trie.cold_tokens == counts["cold"], (trie.cold_tokens, counts)
    assert trie.replay_tokens == counts["replay"], (trie.replay_tokens, counts)
    assert len(trie.hot_queue) == queued["hot"]
    assert len(trie.cold_queue) == queued["cold"]
    assert len(trie.replay_queue) == queued["replay"]
    _check_contexts(trie)


def _check_contexts(trie: NodeTree) -> None:
    """The empty prefix of every namespace with a node counts its ways on; what is forgotten stays in the total."""
    known: dict[Namespace | None, list[int]] = {}
    for child in trie.root.children.values():
        if trie.estimator.learns(child.key.namespace):
            known.setdefault(child.key.namespace, []).append(child.weight)
    contexts = trie.estimator.contexts
    assert all(contexts[namespace].kinds == len(weights) for namespace, weights in known.items())
    assert all(contexts[namespace].total >= sum(weights) for namespace, weights in known.items())
    assert set(contexts) == set(known)


def _check_node(trie: NodeTree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    assert len(node.key) > 0
    assert len(node.key) % trie.page_size == 0
    assert node.start == parent.stop
    assert node.key.namespace == parent.key.namespace or parent is trie.root
    if node.slots is not None:
        assert len(node.slots) == len(node.key)
        assert parent.slots is not None, f"{node} is hot under {parent}"
    elif node.views:
        assert parent.resident, f"{node} is cold under {parent}"
    if node.views:
        assert sum(len(view) for view in node.views) == len(node.key)
        position = node.start
        for view in node.views:
            assert 0 <= view.start < view.stop <= view.block.num_rows
            assert view.block.position + view.start == position
            assert view.block.refs > 0
            position += len(view)
    assert node.hot_children == sum(child.slots is not None for child in node.children.values())
    assert node.resident_children == sum(child.resident for child in node.children.values())
    if node.lock_count:
        assert node.slots is not None
    assert node.total >= sum(child.weight for child in node.children.values())
    assert (node.weight > 0) == trie.estimator.learns(node.key.namespace), f"{node} has weight {node.weight}"
    for child in node.children.values():
        assert child.parent is node
        assert child.lock_count <= node.lock_count
        assert child.pin_count <= node.pin_count


def _expected_queue(trie: NodeTree, node: Node) -> NodeQueue | None:
    if node.slots is not None:
        return trie.hot_queue if node.hot_children == 0 and not node.lock_count else None
    if node.views:
        return trie.cold_queue if node.resident_children == 0 and not node.pin_count else None
    return None if node.children or node.pin_count else trie.replay_queue
