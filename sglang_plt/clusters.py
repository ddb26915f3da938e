"""Clusters of the trie: the sequences whose common prefix has gathered delta bits, and the most probable of each.

A cluster is the subtree below the first node of a path whose ``path_bits`` reach delta: a ball of radius
``2 ** -delta`` of the ultrametric ``Estimator.distance``. (Magarshak, arXiv 2604.15356, groups sessions by such a
threshold.) What stays together above all cuts is one more cluster in each namespace: there 32 sessions of equal
probability stay together when delta is above their bits. Members are the resident leaves, the longest sequences whose
rows can be had; the centroid is the most probable one.

The default, 14, is the smallest even number at which nine of ten members had a member of another session in their
cluster, over 32 to 2,048 generated agent sessions (``test_default_leaves_few_sessions_alone``) and over the first 2,000
requests of both Mooncake traces; at 4 it was one in twenty or fewer.

Which cluster a node belongs to follows from the counts on its path, so it is never stale. The centroid is kept as the
best member below each node: a change marks the path above it, and a question settles what is marked, with a heap of
ways on at each node. Both cost a path; siblings keep their order when only the path's counts have changed, because
they share a denominator.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_plt.keys import Namespace
from sglang_plt.node import Node
from sglang_plt.probability import BIT, ONE, Context, log2_fixed
from sglang_plt.trie import Trie

_SLACK = 64


class Best:
    """The most probable member below a node, given the node.

    Attributes:
        bits: ``-log2 P(leaf | node)``, exact when ``clean``.
        leaf: that member; the node itself when nothing resident is below it; None at an empty prefix without any.
        heap: ``(score, id, child)`` of resident children, the best first; entries whose score has changed are stale.
        changed: children to look at again. A node that is not clean is in ``changed`` of its parent.
    """

    __slots__ = ("bits", "changed", "clean", "heap", "leaf")

    def __init__(self, heap: list[tuple[int, int, Node]]):
        self.bits = 0
        self.leaf: Node | None = None
        self.heap = heap
        self.changed: set[Node] = set()
        self.clean = True


@dataclass(frozen=True, slots=True)
class Cluster:
    """All members below ``root``; without one, those of a namespace that no cut has taken."""

    namespace: Namespace | None
    root: Node | None


class Clusters:
    """The clusters of ``trie`` at ``delta_bits`` bits; takes the trie's ``on_change`` for itself.

    Salted namespaces have no probabilities, hence no clusters.
    """

    def __init__(self, trie: Trie, delta_bits: float):
        if not delta_bits > 0:
            raise ValueError(f"delta_bits must be above 0, got {delta_bits}")
        self.trie = trie
        self.delta = int(delta_bits * BIT)
        trie.on_change = self.touch

    # -- who belongs together -----------------------------------------------------------------------------------------

    def cluster_of(self, node: Node) -> Cluster | None:
        """The cluster of a node below the root; None in a salted namespace. Costs the path."""
        namespace = node.key.namespace
        estimator = self.trie.estimator
        if not estimator.learns(namespace):
            return None
        bits = 0
        for part in self.trie.path(node):
            bits += estimator.edge_bits(part)
            if bits >= self.delta:
                return Cluster(namespace, part)
        return Cluster(namespace, None)

    def all(self) -> Iterator[Cluster]:
        """Every cluster; costs the nodes above the cuts. A cluster may have lost its last member to eviction."""
        estimator = self.trie.estimator
        for namespace in estimator.contexts:
            yield Cluster(namespace, None)
        stack = [(node, 0) for node in self.trie.root.children.values() if estimator.learns(node.key.namespace)]
        while stack:
            node, bits = stack.pop()
            bits += estimator.edge_bits(node)
            if bits >= self.delta:
                yield Cluster(node.key.namespace, node)
            else:
                stack += [(child, bits) for child in node.children.values()]

    def centroid(self, cluster: Cluster) -> Node | None:
        """The most probable member; None when no member is resident."""
        if cluster.root is not None:
            return self._settle(cluster.root).leaf if cluster.root.resident else None
        context = self.trie.estimator.contexts.get(cluster.namespace)
        if context is None:
            return None
        best = self._settle(context, cluster.namespace)
        # the best member of the namespace lies below every cut, or no member does
        return best.leaf if best.bits < self.delta else None

    # -- the best member below each node ------------------------------------------------------------------------------

    def touch(self, node: Node) -> None:
        """The edge or the residency of ``node`` has changed: mark its path, up to where it is marked already."""
        while node.parent is not None:
            best = node.best
            if best is not None:
                if not best.clean:
                    return
                best.clean = False
            above: Node | Context | None = node.parent
            if node.parent.parent is None:
                above = self.trie.estimator.contexts.get(node.key.namespace)
            if above is None or above.best is None:
                return  # looks at all its children when it is asked
            above.best.changed.add(node)
            if len(above.best.changed) > 2 * self._kinds(above) + _SLACK:
                above.best = None  # nobody has asked for long
                if isinstance(above, Context):
                    return
            elif isinstance(above, Context):
                above.best.clean = False
                return
            node = node.parent

    @staticmethod
    def _kinds(holder: Node | Context) -> int:
        return holder.kinds if isinstance(holder, Context) else len(holder.children)

    def _settle(self, top: Node | Context, namespace: Namespace | None = None) -> Best:
        """Bring ``top`` and what is marked below it up to date."""
        stack: list[tuple[Node | Context, bool]] = [(top, False)]
        while stack:
            holder, below_is_settled = stack.pop()
            if holder.best is not None and holder.best.clean:
                continue
            if below_is_settled:
                self._update(holder, namespace)
                continue
            stack.append((holder, True))
            stack += [(child, False) for child in self._pending(holder, namespace)]
        assert top.best is not None
        return top.best

    def _members(self, holder: Node | Context, namespace: Namespace | None) -> list[Node]:
        if isinstance(holder, Context):
            children = self.trie.root.children.values()
            return [child for child in children if child.resident and child.key.namespace == namespace]
        return [child for child in holder.children.values() if child.resident] if holder.resident_children else []

    def _pending(self, holder: Node | Context, namespace: Namespace | None) -> list[Node]:
        if holder.best is None:
            return self._members(holder, namespace)
        parent = self.trie.root if isinstance(holder, Context) else holder
        return [child for child in holder.best.changed if child.parent is parent and child.resident]

    def _update(self, holder: Node | Context, namespace: Namespace | None) -> None:
        """All that is marked below ``holder`` is settled."""
        best = holder.best
        pending = self._pending(holder, namespace)
        if best is not None and len(best.heap) + len(pending) > 4 * self._kinds(holder) + _SLACK:
            best, pending = None, self._members(holder, namespace)
        entries = [(_score(child), child.id, child) for child in pending]
        if best is None:
            heapq.heapify(entries)
            best = holder.best = Best(entries)
        else:
            for entry in entries:
                heapq.heappush(best.heap, entry)
        parent = self.trie.root if isinstance(holder, Context) else holder
        heap = best.heap
        while heap and not _is_live(heap[0], parent):
            heapq.heappop(heap)
        for child in best.changed:
            if child.best is not None and not child.best.clean:
                child.best = None  # not resident: the mark would be taken for one that the path above bears
        best.changed.clear()
        best.clean = True
        if heap:
            score, _, child = heap[0]
            assert child.best is not None
            total, kinds, branches = self.trie.estimator.counts(parent, child)
            best.bits = score + log2_fixed(total + kinds * ONE if branches else child.weight)
            best.leaf = child.best.leaf
        else:
            best.bits, best.leaf = 0, None if isinstance(holder, Context) else holder


def _score(child: Node) -> int:
    """Bits to the best member by way of a settled ``child``, without the denominator that all its siblings share."""
    assert child.best is not None
    return child.best.bits - log2_fixed(child.weight)


def _is_live(entry: tuple[int, int, Node], parent: Node) -> bool:
    score, _, child = entry
    return child.parent is parent and child.resident and score == _score(child)
