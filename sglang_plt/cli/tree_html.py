"""Snapshots of ``sglang_plt.snapshot`` as one page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from sglang_plt.cli.tree_text import (
    TIERS,
    Row,
    Tree,
    cluster_name,
    content,
    count,
    forest,
    hidden,
    mark_centroids,
    notes,
    probability,
    summary,
    visits,
)

_OPEN_ROWS = 12
"""Branches of a fork are shown at once up to so many rows."""

_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#68707a;--line:#dfe3e8;--row:#f5f7f9;--hot:#d9480f;--cold:#1c7ed6;--replay:#adb5bd}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e4e7ea;--dim:#929aa3;--line:#30363d;--row:#1d2125}}
body{background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,sans-serif;margin:24px auto;
max-width:1280px;padding:0 20px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:15px;margin:24px 0 8px}p{margin:4px 0}.dim{color:var(--dim)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th{font-weight:500;color:var(--dim)}
th,td{text-align:right;padding:2px 12px 2px 0}th:last-child,td:last-child{text-align:left}
ul{list-style:none;margin:0;padding:0}
.fork>ul>li,.fork>ul>p{border-left:1px solid var(--line);margin-left:9px;padding-left:14px}
.tops>li{margin:10px 0;border-top:1px solid var(--line);padding-top:6px}
.r{display:grid;grid-template-columns:8px 52px minmax(110px,1fr) 112px 64px 62px 56px 60px;gap:8px;align-items:center;
padding:1px 4px;border-radius:4px;font-variant-numeric:tabular-nums;white-space:nowrap}
.r:hover,.head{background:var(--row)}
.r>*{overflow:hidden;text-overflow:ellipsis}.n{text-align:right}.c{height:16px;border-radius:3px}
.t{font-size:12px;color:#fff;text-align:center;border-radius:3px;padding:0 4px}
.hot{background:var(--hot)}.cold{background:var(--cold)}.replay{background:var(--replay);color:#222}
.k{display:grid;grid-template-columns:120px 200px 110px 1fr;gap:8px;align-items:center;padding-left:14px}
.k>:nth-child(3){text-align:right}a{color:inherit}
.b{height:8px;border-radius:2px;min-width:2px}
.stack{display:flex;height:14px;border-radius:4px;overflow:hidden;max-width:640px;margin:8px 0}
summary,.rest{color:var(--dim);padding-left:4px;font-size:13px}summary{cursor:pointer}.rest{padding-left:20px}
.w{font-family:ui-monospace,monospace;font-size:12px;color:var(--dim)}
.head{color:var(--dim);position:sticky;top:0;z-index:1}button{font:inherit;margin-right:6px}
""".strip()

_SCRIPT = """
document.querySelectorAll("button").forEach(button=>button.onclick=()=>
document.querySelectorAll("details").forEach(part=>part.open=button.value==="open"));
""".strip()


def page(url: str, trees: list[Tree]) -> str:
    """The trees of the server at ``url`` as an HTML document."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>Prefixes of {escape(url)}</title><style>{_STYLE}</style>",
        f"<h1>Prefixes held by {escape(url)}</h1>",
        '<p class="dim">A row is a run of tokens; rows below it go on where it ends, and branches are indented. '
        "P is the probability that a served sequence passes through, bits is -log2 of it. Rows of one colour are one "
        "cluster, * marks its centroid.</p>",
        '<p><button value="open">Open all</button><button value="">Close all</button></p>',
    ]
    for index, tree in enumerate(trees):
        parts += _tree(tree, f"Replica {index}" if len(trees) > 1 else "")
    parts.append(f"<script>{_SCRIPT}</script></html>")
    return "\n".join(parts)


def _tree(tree: Tree, title: str) -> Iterator[str]:
    if title:
        yield f"<h2>{title}</h2>"
    yield f"<p>{escape(summary(tree))}</p>"
    total = max(1, sum(tree["tokens"].values()))
    stack = (f'<div class="{t}" style="width:{100 * tree["tokens"][t] / total:.2f}%" title="{t}"></div>' for t in TIERS)
    yield f'<div class="stack">{"".join(stack)}</div>'
    yield from _clusters(tree)
    yield from _centroids(tree)
    yield "<h2>Tree</h2>"
    if not tree["nodes"]:
        yield "<p>Nothing is held.</p>"
        return
    heads = "".join(f'<span class="n">{name}</span>' for name in ("P", "bits", "visits", "age"))
    yield f'<div class="r head"><span></span><span>tier</span><span>positions</span><span>tokens</span>{heads}</div>'
    longest = max(row["len"] for row in tree["nodes"])
    yield '<ul class="tops">'
    for top in forest(tree):
        yield "<li><ul>"
        yield from _trunk(top, longest)
        yield "</ul></li>"
    yield "</ul>"
    if tree["hidden"]["nodes"]:
        yield f'<p class="dim">{escape(hidden(tree["hidden"]))}</p>'


def _clusters(tree: Tree) -> Iterator[str]:
    clusters = tree["clusters"]
    yield f"<details{' open' if len(clusters) <= _OPEN_ROWS else ''}><summary>{count(tree['num_clusters'], 'cluster')}"
    heads = ("", "", "members", "hot", "cold", "replay", "bits", "centroid", "what members share")
    yield f"</summary><table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"
    for cluster in clusters:
        centroid = cluster["centroid_len"]
        cells = [
            f'<div class="c" style="width:8px;background:{_colour(cluster["number"])}"></div>',
            str(cluster["number"]),
            f"{cluster['members']:,}",
            *(f"{cluster['tokens'][tier]:,}" for tier in TIERS),
            f"{cluster['root_bits']:.2f}",
            f"{centroid:,} tokens" if centroid is not None else "none resident",
            escape(cluster_name(cluster)),
        ]
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield "</table>"
    if tree["num_clusters"] > len(clusters):
        yield f'<p class="dim">... {count(tree["num_clusters"] - len(clusters), "more cluster")}</p>'
    yield "</details>"


def _centroids(tree: Tree) -> Iterator[str]:
    """Rows that others are differences from, each with those and what they hold."""
    dependants = mark_centroids(tree)
    if not dependants:
        return
    by_id = {row["id"]: row for row in tree["nodes"]}
    yield f"<details open><summary>{count(len(dependants), 'row')} that others are kept as differences from</summary>"
    for source, rows in dependants.items():
        row = by_id[source]
        held = [row["bytes"], *(other["bytes"] for other in rows)]
        most = max(1, *held)
        yield f'<p><a href="#r{source}">#{source}</a> {_place(row)}, {count(len(rows), "dependant")}</p><ul>'
        for other, num_bytes in zip([row, *rows], held, strict=True):
            bar = f'<div class="b {other["tier"]}" style="width:{100 * num_bytes / most:.1f}%"></div>'
            near = sum(tokens for above, tokens in other["differences"] if above == source)
            kind = f"{near:,} tokens as differences" if near else "whole"
            link = f'<a href="#r{other["id"]}">{_place(other)}</a>'
            yield f'<li class="k"><span>{link}</span><span>{kind}</span><span>{num_bytes:,} B</span>{bar}</li>'
        yield "</ul>"
    yield "</details>"


def _place(data: dict[str, Any]) -> str:
    return f"{data['start']:,}-{data['start'] + data['len']:,}"


def _trunk(top: Row, longest: int) -> Iterator[str]:
    for row in top.trunk():
        yield f"<li>{_row(row.data, longest)}</li>"
        left_out = row.data["hidden"]
        rest = "" if left_out is None else escape(hidden(left_out))
        if row.branches:
            opened = " open" if sum(_rows(branch) for branch in row.branches) <= _OPEN_ROWS else ""
            held = f"{sum(branch.size for branch in row.branches):,} tokens"
            number = "1 branch" if len(row.branches) == 1 else f"{len(row.branches):,} branches"
            yield f'<li><details class="fork"{opened}><summary>{number}, {held}</summary><ul>'
            for branch in row.branches:
                yield "<li><ul>"
                yield from _trunk(branch, longest)
                yield "</ul></li>"
            yield f"</ul>{f'<p class=rest>{rest}</p>' if rest else ''}</details></li>"
        elif rest:
            yield f'<li class="rest">{rest}</li>'


def _rows(top: Row) -> int:
    rows, stack = 0, [top]
    while stack:
        row = stack.pop()
        rows += 1
        stack += row.branches + ([row.on] if row.on is not None else [])
    return rows


def _row(data: dict[str, Any], longest: int) -> str:
    learns = data["path_bits"] is not None
    note = f' <span class="dim">{notes(data)}</span>' if notes(data) else ""
    text = content(data)
    said = f' <span class="w" title="{escape(text)}">{escape(text)}</span>' if text else ""
    title = f"cluster {data['cluster']}" if data["cluster"] else "no cluster" if not learns else "a cluster not listed"
    place = f"{_place(data)}{' *' if data['centroid'] else ''}"
    width = 100 * data["len"] / longest
    cells = [
        f'<span class="c" style="background:{_colour(data["cluster"])}" title="{title}"></span>',
        f'<span class="t {data["tier"]}">{data["tier"]}</span>',
        f"<span>{place}{note}{said}</span>",
        f'<span title="{data["len"]:,} tokens"><div class="b {data["tier"]}" style="width:{width:.1f}%"></div></span>',
        f'<span class="n">{probability(data["path_bits"])}</span>',
        f'<span class="n">{data["path_bits"]:.2f}</span>' if learns else '<span class="n">-</span>',
        f'<span class="n">{visits(data["visits"])}</span>',
        f'<span class="n">{data["age"]:,}</span>',
    ]
    return f'<div class="r" id="r{data["id"]}">{"".join(cells)}</div>'


def _colour(number: int | None) -> str:
    """Neighbouring numbers get hues far apart."""
    return "var(--line)" if number is None else f"hsl({number * 137.508 % 360:.0f} 62% 52%)"
