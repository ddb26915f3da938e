"""Snapshots of ``sglang_plt.snapshot`` as text, and what text and page have in common."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, Any]
TIERS = ("hot", "cold", "replay")
_MAX_CONTENT = 100


@dataclass
class Row:
    """One row and what hangs below it: ``on`` is a way on with half of the tokens, ``branches`` are the others.

    Drawn as trunks with branches, a tree of N tokens is at most log2(N) levels deep, however long its prefixes.
    """

    data: dict[str, Any]
    on: Row | None = None
    branches: list[Row] = field(default_factory=list)
    size: int = 0

    def trunk(self) -> Iterator[Row]:
        row: Row | None = self
        while row is not None:
            yield row
            row = row.on


def forest(tree: Tree) -> list[Row]:
    """The rows without a row above; rows come parents first and the largest of siblings first."""
    rows: dict[int, Row] = {}
    mark_centroids(tree)
    tops: list[Row] = []
    for data in tree["nodes"]:
        row = rows[data["id"]] = Row(data)
        above = rows.get(data["parent"])
        (tops if above is None else above.branches).append(row)
    for row in reversed(rows.values()):
        below = sum(branch.size for branch in row.branches)
        if row.data["hidden"] is not None:
            below += sum(row.data["hidden"]["tokens"].values())
        row.size = row.data["len"] + below
        if row.branches and 2 * row.branches[0].size >= below:
            row.on = row.branches.pop(0)
    return tops


def mark_centroids(tree: Tree) -> dict[int, list[dict[str, Any]]]:
    """The rows that are differences from each row, by its id; the latter get their number as ``dependants``."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in tree["nodes"]:
        for source, _ in row.get("differences", ()):
            if source is not None:
                found.setdefault(source, []).append(row)
    for row in tree["nodes"]:
        row["dependants"] = len(found.get(row["id"], ()))
    return found


def summary(tree: Tree) -> str:
    """One line: nodes, tokens by tier, clusters, namespaces."""
    shown = sum(row["nodes"] for row in tree["nodes"])
    more = f" ({shown} shown)" if shown != tree["num_nodes"] else ""
    salted = f", {tree['salted_namespaces']} of them salted" if tree["salted_namespaces"] else ""
    return (
        f"{count(tree['num_nodes'], 'node')}{more}; {tokens(tree['tokens'])}; "
        f"{count(tree['num_clusters'], 'cluster')} at {tree['delta_bits']:g} bits; "
        f"{count(tree['namespaces'], 'namespace')}{salted}"
    )


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def tokens(by_tier: dict[str, int]) -> str:
    """The tiers that hold any, or ``no tokens``."""
    held = [f"{by_tier[tier]:,} {tier}" for tier in TIERS if by_tier[tier]]
    return f"tokens: {', '.join(held)}" if held else "no tokens"


def hidden(data: dict[str, Any]) -> str:
    """What a row leaves out."""
    return f"... {count(data['nodes'], 'more node')}, {tokens(data['tokens'])}"


def probability(bits: float | None) -> str:
    """In percent; a dash where there is none."""
    if bits is None:
        return "-"
    percent = 100 * 2.0**-bits
    return "<0.01 %" if percent < 0.01 else f"{percent:.{0 if percent >= 10 else 1 if percent >= 1 else 2}f} %"


def visits(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 10 else f"{number:.3g}"


def cluster_name(cluster: dict[str, Any]) -> str:
    """What its members share."""
    name = "all that no cut takes" if cluster["whole_namespace"] else f"the first {cluster['root_len']:,} tokens"
    return name + (f", namespace {cluster['namespace']}" if cluster["namespace"] else "")


def notes(row: dict[str, Any]) -> str:
    """What is special about a row, or nothing."""
    found = [count(row["nodes"], "node")] if row["nodes"] > 1 else []
    found += [f"{row['locks']} running"] if row["locks"] else []
    found += ["written ahead"] if row["written"] and row["tier"] == "hot" else []
    found += [f"#{row['id']}"] if row.get("dependants") else []
    for source, number in row.get("differences", ()):
        found.append(f"{number:,} as differences from {'what is gone' if source is None else f'#{source}'}")
    if row["parent"] is None and row["namespace"]:
        found.append(f"namespace {row['namespace']}" + (", salted" if row["path_bits"] is None else ""))
    return ", ".join(found)


def content(row: dict[str, Any]) -> str:
    """The text of a row on one line, its token ids where the server has no tokenizer; empty where it is not shown."""
    if "text" in row:
        return repr(row["text"])[1:-1]
    return " ".join(map(str, row.get("tokens", ())))


def lines(url: str, trees: list[Tree]) -> Iterator[str]:
    """The trees as text."""
    for index, tree in enumerate(trees):
        yield f"{url}{f', replica {index}' if len(trees) > 1 else ''}: {summary(tree)}"
        yield from _clusters(tree)
        yield ""
        yield f"{'bits':>7} {'P':>8} {'visits':>7} {'tier':7}{'cluster':>7}  positions (* centroid)"
        for row in forest(tree):
            yield from _trunk(row, "", "")
        if tree["hidden"]["nodes"]:
            yield f"{'':40}{hidden(tree['hidden'])}"


def _clusters(tree: Tree) -> Iterator[str]:
    yield ""
    yield f"{'cluster':>7} {'members':>8} {'hot':>10} {'cold':>10} {'replay':>10} {'bits':>7}  shared by its members"
    for cluster in tree["clusters"][:20]:
        by_tier = " ".join(f"{cluster['tokens'][tier]:10,}" for tier in TIERS)
        numbers = f"{cluster['number']:7} {cluster['members']:8,} {by_tier} {cluster['root_bits']:7.2f}"
        yield f"{numbers}  {cluster_name(cluster)}"
    if tree["num_clusters"] > 20:
        yield f"{'':8}... {count(tree['num_clusters'] - 20, 'more cluster')}"


def _trunk(top: Row, first: str, guide: str) -> Iterator[str]:
    """A trunk: ``first`` leads to its first row, ``guide`` stands before the others, which begin in the same column."""
    lead = first
    for row in top.trunk():
        data = row.data
        bits = "-" if data["path_bits"] is None else f"{data['path_bits']:.2f}"
        numbers = f"{bits:>7} {probability(data['path_bits']):>8} {visits(data['visits']):>7}"
        cells = f"{numbers} {data['tier']:7}{data['cluster'] or '-':>7}  "
        mark = " *" if data["centroid"] else ""
        note = f" ({notes(data)})" if notes(data) else ""
        text = textwrap.shorten(content(data), _MAX_CONTENT, placeholder=" ...")
        yield f"{cells}{lead}{data['start']}-{data['start'] + data['len']}{mark}{note}{'  ' if text else ''}{text}"
        lead = guide
        left_out = data["hidden"]
        for branch in row.branches:
            yield from _trunk(branch, guide + "├─", guide + "│ ")
        if left_out is not None:
            yield f"{'':40}{guide}├─{hidden(left_out)}"
