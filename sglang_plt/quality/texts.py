"""Text to measure on that every Python brings along: nothing is downloaded, nothing is shipped.

Prose is the language reference (``pydoc_data.topics``), code the standard library's own source, and chat is made of
questions about its docstrings and those docstrings as answers. The same Python version gives the same windows.
"""

from __future__ import annotations

import ast
import inspect
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_plt.quality import QualityError

SOURCES = f"Python {sys.version.split()[0]}: language reference (prose), standard library (code), its docstrings (chat)"

_MIN_DOCUMENT_CHARS = 2000
_MAX_CHARS_PER_TOKEN = 8
_ANSWER_CHARS = (80, 900)
_CHAT_MODULES = (
    *("argparse", "ast", "configparser", "contextlib", "datetime", "difflib", "functools", "inspect", "ipaddress"),
    *("logging", "pathlib", "pickle", "random", "shutil", "smtplib", "socket", "statistics", "string", "subprocess"),
    *("tarfile", "textwrap", "threading", "traceback", "turtle", "typing", "uuid", "warnings", "weakref", "zipfile"),
)
_QUESTIONS = (
    "What does {name} in the module {module} do?",
    "Could you explain {name} from {module} to me, please?",
    "I found {name} in {module}. When would I use it?",
    "And how does {name} behave? It is in {module}.",
    "My colleague told me to look at {module}.{name}. What is it for?",
    "Thanks, that helps. What about {name} in {module}?",
)
_SYSTEM = "You are a patient assistant who answers questions about the Python standard library."


@dataclass(frozen=True)
class Window:
    """``ids``: the tokens of one measurement; ``kind``: what sort of text they are."""

    kind: str
    ids: list[int]


def builtin_windows(tokenizer: Any, count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens: prose, code, chat, prose, ...; no text is used twice.

    Raises:
        QualityError: Python does not bring that much text of a kind.
    """
    kinds: list[tuple[str, Iterator[str]]] = [
        ("prose", _prose()),
        ("code", _code()),
        ("chat", _chats(tokenizer, length * _MAX_CHARS_PER_TOKEN)),
    ]
    windows = []
    for index in range(count):
        kind, documents = kinds[index % len(kinds)]
        ids = _fill(partial(_encode, tokenizer, special=kind != "chat"), documents, length)
        if ids is None:
            raise QualityError(
                f"--windows={count}: the built-in {kind} does not fill {count} windows of {length} tokens; ask for "
                "fewer windows or shorter ones, or give your own text with --text"
            )
        windows.append(Window(kind, ids))
    return windows


def file_windows(tokenizer: Any, path: Path, count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens, evenly spread over the text file ``path``.

    Raises:
        QualityError: the file cannot be read as UTF-8, or is too short.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QualityError(f"--text={path} cannot be read ({error.strerror}): give a text file") from error
    except UnicodeDecodeError as error:
        raise QualityError(f"--text={path} is not UTF-8 (byte {error.start}): convert it first") from error
    ids = _encode(tokenizer, text, special=True)
    if len(ids) < count * length:
        raise QualityError(
            f"--text={path} has {len(ids)} tokens, {count} windows of {length} need {count * length}: give a longer "
            "text, or lower --windows, --context or --continuation"
        )
    starts = [index * (len(ids) - length) // max(1, count - 1) for index in range(count)]
    return [Window("file", ids[start : start + length]) for start in starts]


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


def _prose() -> Iterator[str]:
    from pydoc_data.topics import topics

    names = sorted(name for name, text in topics.items() if len(text) >= _MIN_DOCUMENT_CHARS)
    random.Random("prose").shuffle(names)
    return (topics[name] for name in names)


def _code() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py") if path.stat().st_size >= _MIN_DOCUMENT_CHARS)
    random.Random("code").shuffle(files)
    return (path.read_text(encoding="utf-8", errors="replace") for path in files)


def _docstrings() -> list[tuple[str, str, str]]:
    """(module, name, docstring) of public functions, classes and methods; read from source, so nothing is imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for module in _CHAT_MODULES:
        path = next((p for p in (root / f"{module}.py", root / module / "__init__.py") if p.is_file()), None)
        if path is None:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                answer = inspect.cleandoc(ast.get_docstring(node) or "")
                if _ANSWER_CHARS[0] <= len(answer) <= _ANSWER_CHARS[1]:
                    found.append((module, node.name, answer))
    return found


def _chats(tokenizer: Any, chars: int) -> Iterator[str]:
    """Conversations of at least ``chars`` characters in the model's chat format, until the docstrings are used up."""
    rng = random.Random("chat")
    facts = _docstrings()
    rng.shuffle(facts)
    messages = [{"role": "system", "content": _SYSTEM}]
    held = 0
    for module, name, answer in facts:
        question = rng.choice(_QUESTIONS).format(module=module, name=name)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        held += len(question) + len(answer)
        if held >= chars:
            yield _format(tokenizer, messages)
            messages, held = messages[:1], 0


def _format(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n\n".join(f"{message['role'].title()}: {message['content']}" for message in messages)
