"""P(next | prefix) on every edge of the trie, estimated online from what was served, in integers.

The estimator is method C of prediction by partial matching (Moffat, "Implementing the PPM data compression scheme",
IEEE Trans. Comm. 38, 1990; Witten and Bell, "The zero-frequency problem", IEEE Trans. Inf. Theory 37, 1991): after a
prefix that was continued ``n`` times in ``q`` ways, a way that was taken ``w`` times has probability ``w / (n + q)``,
and what was never seen keeps ``q / (n + q)``. The symbols are whole edges, and only branch points estimate: a node
with one way on that was always taken passes its probability through, and a sequence that leaves inside an edge is an
escape at the branch point above it. So a path costs a few additions a node, nothing a token, and a split without a
new branch changes no probability. The root of a namespace always is a branch point.

Counts are integers in units of 1/:data:`ONE` of a visit. Once a prefix was continued :data:`DECAY_VISITS` times (more
where it branches more) its counts are halved, so the past fades and counts stay bounded. What an evicted and forgotten
node was worth stays in its parent's ``n``: it is part of the unseen again.

Where a request computed the model's own log-probabilities, P(edge) of the model is the mean of a prior worth one visit
(MacKay and Peto, "A hierarchical Dirichlet language model", 1995): a new edge starts with ``1 + P_model`` visits.

Information is measured in bits as integers in units of ``1 / BIT``; equal counts give equal integers on every rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_plt.clusters import Best
    from sglang_plt.keys import Namespace
    from sglang_plt.node import Node

ONE = 256
"""One visit."""
BIT = 1 << 16
"""One bit of information."""
DECAY_VISITS = 4096
DECAY_FROM = DECAY_VISITS * ONE
"""No prefix that was continued less is halved."""


@lru_cache(maxsize=1 << 16)
def log2_fixed(n: int) -> int:
    """``floor(BIT * log2(n))`` of a positive integer, by repeated squaring of its mantissa (Turner, "A fast binary
    logarithm algorithm", IEEE Signal Processing Magazine 27, 2010); no floating point.

    >>> log2_fixed(1), log2_fixed(8) // BIT, log2_fixed(10) / BIT
    (0, 3, 3.3219146728515625)
    """
    if n < 1:
        raise ValueError(f"the logarithm of {n} does not exist")
    exponent = n.bit_length() - 1
    mantissa = n << 63 >> exponent
    result = exponent
    for _ in range(BIT.bit_length() - 1):
        mantissa = mantissa * mantissa >> 63
        carry = mantissa >> 64
        mantissa >>= carry
        result = result << 1 | carry
    return result


def prior_weight(model_bits: int) -> int:
    """What the model's own probability of an edge, ``2 ** (-model_bits / BIT)``, is worth in units.

    It is rounded down to a power of two; below 1 / ONE it is worth nothing.
    """
    return ONE >> max(0, -(-model_bits // BIT))


class Context:
    """What was served in one namespace behind the empty prefix.

    Attributes:
        total: how often, in units.
        kinds: ways on that the trie holds.
        best: of :class:`sglang_plt.clusters.Clusters`.
    """

    __slots__ = ("best", "kinds", "total")

    def __init__(self) -> None:
        self.total = 0
        self.kinds = 0
        self.best: Best | None = None


class Estimator:
    """The probabilities of one trie; ``node.weight`` and ``node.total`` hold the counts.

    A namespace with a salt has none: its requests teach nothing, and asking for a probability is a ValueError. Any
    other namespace has an empty prefix of its own, so nothing that one of them was served moves a probability of
    another.
    """

    def __init__(self) -> None:
        self.contexts: dict[Namespace | None, Context] = {}

    @staticmethod
    def learns(namespace: Namespace | None) -> bool:
        return namespace is None or namespace[1] is None

    def context(self, namespace: Namespace | None) -> Context | None:
        """The empty prefix of ``namespace``, made when it is new; None where nothing is learned."""
        context = self.contexts.get(namespace)
        if context is None and self.learns(namespace):
            context = self.contexts[namespace] = Context()
        return context

    @staticmethod
    def decay(parent: Node, node: Node, seen: Node | Context) -> bool:
        """Halve the counts behind ``parent``, in the namespace of its child ``node``, if it is time.

        ``seen`` holds their total. Costs the number of children, once in at least half as many visits.
        """
        kinds = seen.kinds if isinstance(seen, Context) else len(parent.children)
        if seen.total <= DECAY_FROM + kinds * ONE:
            return False
        known = halved = 0
        for child in siblings(parent, node):
            known += child.weight
            child.weight = (child.weight + 1) // 2
            halved += child.weight
        seen.total = halved + (seen.total - known) // 2
        return True

    def forget(self, node: Node) -> None:
        """``node`` leaves the trie; only a way on from an empty prefix is counted apart."""
        context = self.contexts.get(node.key.namespace)
        if context is not None:
            context.kinds -= 1
            if context.kinds == 0:
                del self.contexts[node.key.namespace]

    # -- probabilities ------------------------------------------------------------------------------------------------

    def counts(self, parent: Node, node: Node) -> tuple[int, int, bool]:
        """``(n in units, q, whether it is a branch point)`` of the prefix ``parent`` in the namespace of ``node``."""
        if not node.weight:
            raise ValueError("the requests of a salted namespace are not learned from: it has no probabilities")
        if parent.parent is None:
            context = self.contexts[node.key.namespace]
            return context.total, context.kinds, True
        kinds = len(parent.children)
        return parent.total, kinds, kinds > 1 or parent.total != node.weight

    def edge_bits(self, node: Node) -> int:
        """``-log2 P(node | its parent)``, at least 0."""
        parent = node.parent
        if parent is None:
            raise ValueError("the root is not an edge")
        total, kinds, branches = self.counts(parent, node)
        return log2_fixed(total + kinds * ONE) - log2_fixed(node.weight) if branches else 0

    def escape_bits(self, node: Node) -> int:
        """``-log2`` of the probability that the branch point whose way ``node`` is goes on in a way never seen."""
        parent = node.parent
        while parent is not None:
            total, kinds, branches = self.counts(parent, node)
            if branches:
                known = sum(child.weight for child in siblings(parent, node))
                return log2_fixed(total + kinds * ONE) - log2_fixed(total - known + kinds * ONE)
            node, parent = parent, parent.parent
        raise ValueError("the root is not an edge")

    def path_bits(self, node: Node) -> int:
        """``-log2 P(path)``, the sum of its edges: 0 at the root, never less further down."""
        bits = 0
        while node.parent is not None:
            bits += self.edge_bits(node)
            node = node.parent
        return bits

    # -- similarity and distance --------------------------------------------------------------------------------------

    def shared_bits(self, s: Node, t: Node) -> int:
        """``-log2 P(s ^ t)``: the information in the longest common prefix (in whole pages) of two sequences.

        This is what Magarshak (arXiv 2604.15356) prints as a metric. It is none: ``shared_bits(s, s) > 0``, and the
        triangle inequality fails. It is a similarity, large where much is shared; :meth:`distance` goes with it.
        Nodes of different namespaces share nothing.
        """
        return self.path_bits(common_prefix(s, t))

    def distance(self, s: Node, t: Node) -> float:
        """The ultrametric of the trie: 0 where ``s`` is ``t``, else ``P(s ^ t)``, at most 1.

        ``distance(a, c) <= max(distance(a, b), distance(b, c))``. A float for people: what decides should compare
        :meth:`shared_bits`, whose order is the reverse.
        """
        if s is t:
            return 0.0
        return max(2.0 ** (-self.shared_bits(s, t) / BIT), 5e-324)


def common_prefix(s: Node, t: Node) -> Node:
    """The node where the longest common prefix of two nodes of one trie ends; costs their paths."""
    while s is not t:
        if s.stop < t.stop:
            s, t = t, s
        assert s.parent is not None, "the nodes are of two trees"
        s = s.parent
    return s


def siblings(parent: Node, node: Node) -> Iterable[Node]:
    """The children of ``parent`` in the namespace of ``node``."""
    if parent.parent is not None:
        return parent.children.values()
    namespace = node.key.namespace
    return [child for child in parent.children.values() if child.key.namespace == namespace]
