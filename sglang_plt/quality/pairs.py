"""Pairs of prompts that differ a little: what the second costs as a difference from the first, and what it does to it.

The texts are those of :mod:`sglang_plt.quality.texts`; nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_plt.quality import QualityError
from sglang_plt.quality.chats import conversations
from sglang_plt.quality.texts import documents

PROMPT = 800
"""Tokens of a prompt."""
CONTINUATION = 160
"""Tokens behind it whose distributions are compared."""
NAMES = (
    "synonym",
    "punctuation",
    "blank-line",
    "inserted-word",
    "name-and-date",
    "name",
    "document-swapped",
    "documents-reordered",
)
"""What differs."""

_SYNONYMS = {
    "important": "significant",
    "large": "big",
    "people": "persons",
    "many": "numerous",
    "however": "nevertheless",
    "because": "since",
    "only": "just",
    "never": "not",
    "upon": "on",
    "before": "ahead of",
    "great": "large",
    "little": "small",
    "should": "ought to",
    "house": "home",
}
_AGENT = (
    "You are the assistant of {name}. Today is {date}. You work in a terminal, answer in short sentences, and say so "
    "when you do not know. Tools: lookup(module, name), open_ticket(title, body).\n\n"
)


@dataclass(frozen=True)
class Pair:
    """Tokens of both prompts; ``target`` goes on behind its first :data:`PROMPT` tokens."""

    name: str
    reference: list[int]
    target: list[int]


def near_pairs(tokenizer: Any, names: Collection[str] = NAMES) -> list[Pair]:
    """Those of ``names``, in the order of :data:`NAMES`.

    Raises:
        QualityError: a text is too short for the tokenizer.
    """
    found = []
    for name, first, second in _texts(tokenizer):
        if name not in names:
            continue
        reference, target = (
            tokenizer(text, add_special_tokens=True, verbose=False).input_ids for text in (first, second)
        )
        if min(len(reference), len(target)) < PROMPT + CONTINUATION:
            raise QualityError(f"pair {name}: {len(target)} tokens of text, {PROMPT + CONTINUATION} are needed")
        if reference[:PROMPT] == target[:PROMPT]:
            raise QualityError(f"pair {name}: the prompts do not differ")
        found.append(Pair(name, reference[: PROMPT + CONTINUATION], target[: PROMPT + CONTINUATION]))
    return found


def _texts(tokenizer: Any) -> Iterator[tuple[str, str, str]]:
    chars = 8 * (PROMPT + CONTINUATION)
    prose, code = documents("prose", "evaluation"), documents("code", "evaluation")
    text = _long(prose, chars, lambda text: any(f" {word} " in text[60:500] for word in _SYNONYMS))
    word = min(
        (word for word in _SYNONYMS if f" {word} " in text[60:500]), key=lambda word: text.index(f" {word} ", 60)
    )
    at = text.index(f" {word} ", 60)
    yield "synonym", text, f"{text[:at]} {_SYNONYMS[word]} {text[at + len(word) + 2 :]}"
    text = _long(prose, chars, lambda text: ", " in text[60:300])
    at = text.index(", ", 60)
    yield "punctuation", text, text[:at] + ";" + text[at + 1 :]
    text = _long(code, chars, lambda text: "\n" in text[200:400])
    at = text.index("\n", 200)
    yield "blank-line", text, text[:at] + "\n" + text[at:]
    text = _long(prose, chars, lambda text: " " in text[70:200])
    at = text.index(" ", 70)
    yield "inserted-word", text, text[:at] + " really" + text[at:]
    chats = conversations(tokenizer, "evaluation", chars)
    chat = next(chats)
    first, second = (
        {"name": "Daniel", "date": "Tuesday, 4 November 2025"},
        {"name": "Priya", "date": "Friday, 16 January 2026"},
    )
    yield "name-and-date", _AGENT.format(**first) + chat, _AGENT.format(**second) + chat
    chat = next(chats)
    yield "name", _AGENT.format(**first) + chat, _AGENT.format(**{**first, "name": "Sophia"}) + chat
    parts: list[str] = []
    while len(parts) < 7:
        found = (part.strip() for part in re.split(r"\n\s*\n", next(prose)) if 500 < len(part.strip()) < 900)
        parts += list(found)[:2]
    rest = _long(prose, chars, lambda text: True)
    yield "document-swapped", _retrieval(parts[:4], parts, rest), _retrieval([parts[4], *parts[1:4]], parts, rest)
    moved = [parts[1], parts[0], *parts[2:4]]
    yield "documents-reordered", _retrieval(parts[:4], parts, rest), _retrieval(moved, parts, rest)


def _retrieval(chosen: list[str], parts: list[str], rest: str) -> str:
    shown = "\n\n".join(f"[Document]\n{part}" for part in chosen)
    return (
        f"Answer using only the documents below.\n\n{shown}\n\nQuestion: Summarise what the documents say, in plain "
        f"words.\n\nAnswer: {parts[5]}\n\n{parts[6]}\n\n{rest}"
    )


def _long(texts: Iterator[str], chars: int, serves: Callable[[str], bool]) -> str:
    for text in texts:
        if len(text) >= chars and serves(text):
            return text[:chars]
    raise QualityError(f"no built-in text of {chars} characters is left for a pair")
