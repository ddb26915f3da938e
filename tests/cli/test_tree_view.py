"""The page and the text of ``sglang-plt tree``."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from sglang_plt.cli.tree_html import page
from sglang_plt.cli.tree_text import forest, lines, probability
from sglang_plt.clusters import Clusters
from sglang_plt.snapshot import TreeSnapshot
from tests.test_probability import insert, make_trie


def make_tree(num_sessions: int = 12, **kwargs) -> dict:
    """A preamble and sessions of three turns, one evicted, one salted, one of an adapter."""
    trie = make_trie([[1] * 40 + [100 + s] * (10 * t) for t in (1, 2, 3) for s in range(num_sessions)])
    insert(trie, [2] * 30, ("adapter", None))
    insert(trie, [3] * 30, (None, "salt"))
    trie.clear_hot(trie.hot_queue.peek())
    return TreeSnapshot(Clusters(trie, 8.0), **kwargs).plain()


class Page(HTMLParser):
    """Checks that tags nest, and collects text and attributes."""

    VOID = ("meta", "!doctype")

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.depth = 0
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
            self.depth = max(self.depth, self.open.count("details"))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def test_the_page_loads_nothing_and_nests():
    shown = Page(page("http://x", [make_tree()]))
    assert shown.open == []
    assert not {"src", "href", "action"} & {name for name, _ in shown.attributes}
    source = page("http://x", [make_tree()])
    assert not re.search(r"url\(|@import|https?://(?!x)", source)
    text = " ".join(shown.text)
    for expected in ("39 nodes", "2 clusters", "0-40", "namespace 1", "replay"):
        assert expected in text


def test_content_is_escaped():
    tree = make_tree(token_preview=1)
    for row in tree["nodes"]:
        row["text"] = '<script>alert("x")</script>'
    source = page('http://x/"><b>', [tree])
    assert source.count("<script>") == 1
    assert Page(source).open == []
    assert "alert(&quot;x&quot;)" in source
    assert "<b>" not in source


def test_what_is_left_out_is_summed_up():
    tree = make_tree(max_nodes=5)
    text = "\n".join(lines("http://x", [tree]))
    assert " shown)" in text
    assert re.search(r"├─\.\.\. \d+ more nodes, tokens: ", text)
    assert "more nodes, tokens: " in page("http://x", [tree])


def test_a_long_trunk_is_not_deep():
    """500 turns with a fork at each: a line each in the same column, not 500 levels."""
    history: list[int] = []
    trie = make_trie()
    for turn in range(500):
        history += [turn] * 5
        insert(trie, history)
        insert(trie, [*history, 9999])
    tree = TreeSnapshot(Clusters(trie, 8.0), max_nodes=5000).plain()
    source = page("http://x", [tree])
    assert Page(source).depth <= 2
    assert max(map(len, lines("http://x", [tree]))) < 120
    (top,) = forest(tree)
    assert len(list(top.trunk())) == 500


def test_an_empty_tree():
    tree = TreeSnapshot(Clusters(make_trie(), 8.0)).plain()
    assert "Nothing is held" in page("http://x", [tree])
    assert next(lines("http://x", [tree])) == "http://x: 0 nodes; no tokens; 0 clusters at 8 bits; 0 namespaces"


def test_probabilities_are_readable():
    shown = [probability(bits) for bits in (None, 0.0, 0.01, 3.0, 4.0, 7.0, 13.0, 14.0, 5000.0)]
    assert shown == ["-", "100 %", "99 %", "12 %", "6.2 %", "0.78 %", "0.01 %", "<0.01 %", "<0.01 %"]
