"""Text to calibrate and to measure on: prose that is shipped, the standard library's own source, generated chat.

Nothing is downloaded. ``evaluation`` and ``calibration`` share no document; the same Python gives the same windows.
"""

from __future__ import annotations

import lzma
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from sglang_plt.quality import QualityError
from sglang_plt.quality.chats import conversations
from sglang_plt.quality.library import library_sources

SOURCES = (
    "public-domain novels and addresses (prose), "
    f"the standard library of Python {sys.version.split()[0]} (code), chat about its docstrings (chat)"
)
SPLITS = ("evaluation", "calibration")
KINDS = ("prose", "code", "chat")

_MAX_CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class Window:
    """``ids``: the tokens of one measurement; ``kind``: what sort of text they are."""

    kind: str
    ids: list[int]


def builtin_windows(tokenizer: Any, count: int, length: int, split: str = "evaluation") -> list[Window]:
    """``count`` windows of ``length`` tokens: prose, code, chat, prose, ...; no text is used twice.

    Raises:
        QualityError: there is not that much text of a kind.
    """
    kinds: list[tuple[str, Iterator[str]]] = [
        ("prose", _prose(split, length)),
        ("code", _code(split)),
        ("chat", conversations(tokenizer, split, length * _MAX_CHARS_PER_TOKEN)),
    ]
    windows = []
    for index in range(count):
        kind, documents = kinds[index % len(kinds)]
        ids = _fill(partial(_encode, tokenizer, special=kind != "chat"), documents, length)
        if ids is None:
            raise QualityError(
                f"the built-in {kind} does not fill {count} windows of {length} tokens; ask for fewer windows or "
                "shorter ones, or give your own text with --text"
            )
        windows.append(Window(kind, ids))
    return windows


def documents(kind: str, split: str) -> Iterator[str]:
    """The texts of ``kind``, prose or code, one after another."""
    return _prose(split, 1 << 20) if kind == "prose" else _code(split)


def file_windows(tokenizer: Any, path: Path, count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens, evenly spread over the text file ``path``.

    Raises:
        QualityError: the file cannot be read as UTF-8, or is too short.
    """
    ids = file_tokens(tokenizer, path)
    if len(ids) < count * length:
        raise QualityError(
            f"--text={path} has {len(ids)} tokens, {count} windows of {length} need {count * length}: give a longer "
            "text, or ask for fewer or shorter windows"
        )
    starts = [index * (len(ids) - length) // max(1, count - 1) for index in range(count)]
    return [Window("file", ids[start : start + length]) for start in starts]


def file_tokens(tokenizer: Any, path: Path) -> list[int]:
    """The tokens of the UTF-8 text file ``path``.

    Raises:
        QualityError: the file cannot be read as UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QualityError(f"--text={path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise QualityError(f"--text={path} is not UTF-8 (byte {error.start}): convert it first") from error
    return _encode(tokenizer, text, special=True)


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return tokenizer(text, add_special_tokens=special, verbose=False).input_ids


def _fill(encode: Callable[[str], list[int]], documents: Iterator[str], length: int) -> list[int] | None:
    """The first ``length`` tokens of as many documents as they take; None when those run out."""
    text = ""
    for document in documents:
        text += document[: length * _MAX_CHARS_PER_TOKEN] + "\n\n"
        if len(text) >= length and len(ids := encode(text)) >= length:
            return ids[:length]
    return None


def _prose(split: str, length: int) -> Iterator[str]:
    packed = files("sglang_plt.quality").joinpath("corpus", f"{split}_prose.txt.xz").read_bytes()
    documents = [text.split("\n", 1)[1] for text in lzma.decompress(packed).decode().split("\f")]
    if split == "calibration":  # long excerpts: several windows each
        step = 6 * length
        documents = [
            text[start : start + step] for text in documents for start in range(0, len(text) - step // 2, step)
        ]
    random.Random("prose").shuffle(documents)
    return iter(documents)


def _code(split: str) -> Iterator[str]:
    paths = library_sources(split)
    random.Random("code").shuffle(paths)
    return (path.read_text(encoding="utf-8", errors="replace") for path in paths)
