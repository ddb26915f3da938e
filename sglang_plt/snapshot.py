"""What can be told of a live trie in a bounded number of plain numbers, for ``sglang-plt tree``.

Runs where the trie lives, between two of its operations. Tokens are content: they are left out unless asked for, and
those of salted namespaces always are, as are the names of namespaces.
"""

from __future__ import annotations

import heapq
from typing import Any

from sglang_plt.clusters import Cluster, Clusters
from sglang_plt.keys import Namespace
from sglang_plt.node import Node
from sglang_plt.probability import BIT, ONE

FORMAT = 1
MAX_CLUSTERS = 200
"""Clusters that are listed one by one, those with most tokens first."""
TIERS = ("hot", "cold", "replay")


_FIELD = 48
"""A sum over nodes is one integer, so that it costs one addition a node: their number and their tokens by tier, each in
a field of so many bits."""


def _single(node: Node) -> int:
    return 1 | len(node) << _FIELD * (1 + TIERS.index(node.tier))


def _plain_sum(total: int) -> dict[str, Any]:
    fields = [total >> _FIELD * index & ((1 << _FIELD) - 1) for index in range(1 + len(TIERS))]
    return {"nodes": fields[0], "tokens": dict(zip(TIERS, fields[1:], strict=True))}


def _size(total: int) -> int:
    return sum(_plain_sum(total)["tokens"].values())


class TreeSnapshot:
    """One reading of a trie and its clusters; costs a few microseconds a node.

    Args:
        max_nodes: rows of :meth:`plain`, those with most tokens below them first; the others are summed up.
        token_preview: token ids at the start of a row that are shown; 0 shows none.
    """

    def __init__(self, clusters: Clusters, *, max_nodes: int = 2000, token_preview: int = 0):
        self._clusters = clusters
        self._trie = clusters.trie
        self._max_nodes = max(1, max_nodes)
        self._token_preview = token_preview
        self._bits: dict[int, int] = {}
        self._below: dict[int, int] = {}  # sums of whole subtrees
        self._cluster: dict[int, Cluster] = {}
        self._members: dict[Cluster, int] = {}
        self._centroids: dict[Cluster, Node] = {}
        self._totals: dict[Cluster, int] = dict.fromkeys(clusters.all(), 0)
        self._namespaces: dict[Namespace | None, int] = {None: 0}
        self._read()

    def _read(self) -> None:
        estimator, delta = self._trie.estimator, self._clusters.delta
        bits, below, cluster_of, totals = self._bits, self._below, self._cluster, self._totals
        uncut = {namespace: Cluster(namespace, None) for namespace in estimator.contexts}
        order = list(self._trie.nodes())
        for node in order:
            namespace, parent = node.key.namespace, node.parent
            assert parent is not None
            if namespace not in self._namespaces:
                self._namespaces[namespace] = len(self._namespaces)
            own = below[node.id] = _single(node)
            if namespace not in uncut:
                continue
            path_bits = bits[node.id] = bits.get(parent.id, 0) + estimator.edge_bits(node)
            cluster = cluster_of.get(parent.id, uncut[namespace])
            if path_bits >= delta and cluster.root is None:
                cluster = Cluster(namespace, node)
            cluster_of[node.id] = cluster
            totals[cluster] += own
            if not node.resident_children and node.resident:
                self._members[cluster] = self._members.get(cluster, 0) + 1
                # the pass sees every member: nothing to settle for Clusters.centroid, which may differ on ties
                best = self._centroids.get(cluster)
                if best is None or path_bits < bits[best.id]:
                    self._centroids[cluster] = node
        below[self._trie.root.id] = 0
        for node in reversed(order):
            assert node.parent is not None
            below[node.parent.id] += below[node.id]

    def plain(self) -> dict[str, Any]:
        """Nothing but dicts, lists, strings and numbers: a summary, ``clusters`` and ``nodes``, parents first.

        A row of ``nodes`` is a run of nodes in one tier without a branch in between; ``parent`` is the row above, None
        at the top. Bits are floats, None in a salted namespace. ``hidden`` sums what is below a row and not shown.
        ``bytes`` are those of a row's blocks, ``differences`` how many of its tokens are kept as differences from each
        row: ``[row or None, tokens]``, None for rows that are not shown or whose prefix is gone.
        """
        salted = sum(not self._trie.estimator.learns(namespace) for namespace in self._namespaces)
        listed = sorted(self._totals, key=self._rank)[:MAX_CLUSTERS]
        number = {cluster: index + 1 for index, cluster in enumerate(listed)}
        rows, top = self._rows(number, {node.id for node in self._centroids.values()})
        return {
            "format": FORMAT,
            "clock": self._trie.clock,
            "page_size": self._trie.page_size,
            "delta_bits": self._clusters.delta / BIT,
            "namespaces": len(self._trie.estimator.contexts) + salted,
            "salted_namespaces": salted,
            "num_nodes": self._trie.num_nodes,
            "num_clusters": len(self._totals),
            "tokens": _plain_sum(self._below[self._trie.root.id])["tokens"],
            "clusters": [self._cluster_row(c, number[c]) for c in listed],
            "nodes": rows,
            "hidden": _plain_sum(top),
        }

    def _rank(self, cluster: Cluster) -> tuple[int, int]:
        return -_size(self._totals[cluster]), cluster.root.id if cluster.root is not None else 0

    def _cluster_row(self, cluster: Cluster, number: int) -> dict[str, Any]:
        centroid = self._centroids.get(cluster)
        return {
            "number": number,
            "whole_namespace": cluster.root is None,
            "namespace": self._namespaces[cluster.namespace],
            "root_len": cluster.root.stop if cluster.root is not None else 0,
            "root_bits": _in_bits(self._bits[cluster.root.id]) if cluster.root is not None else 0.0,
            "members": self._members.get(cluster, 0),
            "centroid_len": centroid.stop if centroid is not None else None,
            "centroid_bits": _in_bits(self._bits[centroid.id]) if centroid is not None else None,
            **_plain_sum(self._totals[cluster]),
        }

    def _rows(self, number: dict[Cluster, int], centroids: set[int]) -> tuple[list[dict[str, Any]], int]:
        rows: list[dict[str, Any]] = []
        runs: list[tuple[dict[str, Any], list[Node]]] = []
        heap: list[tuple[int, int, Node, dict[str, Any] | None]] = []

        def offer(node: Node, parent: dict[str, Any] | None) -> None:
            heapq.heappush(heap, (-_size(self._below[node.id]), node.id, node, parent))

        for node in self._trie.root.children.values():
            offer(node, None)
        while heap and len(rows) < self._max_nodes:
            _, _, node, parent = heapq.heappop(heap)
            run = self._run(node)
            row = self._row(run, None if parent is None else parent["id"])
            row["cluster"] = number.get(self._cluster[node.id]) if node.id in self._cluster else None
            row["centroid"] = run[-1].id in centroids
            rows.append(row)
            runs.append((row, run))
            for child in run[-1].children.values():
                offer(child, row)
        hidden: dict[int | None, int] = {None: 0}
        for _, _, node, parent in heap:
            above = None if parent is None else parent["id"]
            hidden[above] = hidden.get(above, 0) + self._below[node.id]
        _relate(runs)
        for row in rows:
            row["hidden"] = _plain_sum(hidden[row["id"]]) if row["id"] in hidden else None
        return rows, hidden[None]

    def _run(self, node: Node) -> list[Node]:
        """``node`` and what follows without a branch, in the same tier and at the same probability."""
        run = [node]
        while len(node.children) == 1:
            (child,) = node.children.values()
            if child.tier != node.tier or self._bits.get(child.id) != self._bits.get(node.id):
                break
            run.append(child)
            node = child
        return run

    def _row(self, run: list[Node], parent: int | None) -> dict[str, Any]:
        first, last = run[0], run[-1]
        learns = self._trie.estimator.learns(first.key.namespace)
        row: dict[str, Any] = {
            "id": first.id,
            "parent": parent,
            "start": first.start,
            "len": last.stop - first.start,
            "nodes": len(run),
            "tier": first.tier,
            "written": all(node.views for node in run),
            "locks": first.lock_count,
            "age": self._trie.clock - max(node.last_access for node in run),
            "namespace": self._namespaces[first.key.namespace],
            "visits": first.weight / ONE if learns else None,
            "edge_bits": _in_bits(self._trie.estimator.edge_bits(first)) if learns else None,
            "path_bits": _in_bits(self._bits[first.id]) if learns else None,
        }
        if self._token_preview and learns:
            row["tokens"] = [t for node in run for t in node.key.tokens[: self._token_preview]][: self._token_preview]
        return row


def _relate(runs: list[tuple[dict[str, Any], list[Node]]]) -> None:
    """Fill in what the blocks of rows hold, and which rows they are differences from."""
    row_of: dict[int, int] = {}
    for row, run in runs:
        for view in (view for node in run for view in node.views):
            row_of.setdefault(view.block.id, row["id"])
    for row, run in runs:
        blocks = {view.block.id: view.block for node in run for view in node.views}
        found: dict[int | None, int] = {}
        for block in blocks.values():
            for reference in block.references:
                source = row_of.get(reference.block.id)
                found[source] = found.get(source, 0) + reference.num_rows
        row["bytes"] = sum(block.num_bytes for block in blocks.values())
        row["differences"] = [list(pair) for pair in found.items()]


def _in_bits(bits: int) -> float:
    return round(bits / BIT, 3)
