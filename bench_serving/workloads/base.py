"""What a workload is: sessions of turns, in token ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

ASSISTANT = "\n\nAssistant:"
"""Ends what a turn appends; the answer follows."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One request: the history of its session and ``append`` are the prompt, the answer goes on the history.

    Attributes:
        append: token ids.
        max_new_tokens: exact length of the answer; end-of-text does not end it.
        think_s: seconds between the last answer and this request.
    """

    append: tuple[int, ...]
    max_new_tokens: int
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if self.think_s < 0:
            raise ValueError(f"think_s={self.think_s} must not be negative")


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns that share a history.

    Attributes:
        name: of its own within the workload.
        preamble: token ids before the first turn, for example a system prompt.
        turns: in order; every one waits for the answer of the one before it.
        start_s: when it starts, in seconds after the run; None where the workload does not say.
        parent: session that this one branches off; its history so far comes before ``preamble``.
        parent_turns: number of turns of ``parent`` that must be answered before.
    """

    name: str
    turns: tuple[Turn, ...]
    preamble: tuple[int, ...] = ()
    start_s: float | None = None
    parent: str | None = None
    parent_turns: int = 0

    @property
    def own_tokens(self) -> int:
        """Tokens that it adds to the history of its parent, answers included."""
        return len(self.preamble) + sum(len(turn.append) + turn.max_new_tokens for turn in self.turns)


class Tokenizer(Protocol):
    """The tokenizer of the model that is served."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Workload(Protocol):
    """A frozen dataclass of parameters; the same parameters and tokenizer give the same sessions."""

    @property
    def name(self) -> str: ...

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """All sessions; a parent comes before its children."""


class ModelTokenizer:
    """The ``tokenizer.json`` of a model directory.

    Raises:
        FileNotFoundError: the directory has none.
    """

    def __init__(self, model_path: Path):
        from tokenizers import Tokenizer as Loaded

        path = model_path / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: give the directory of a model with a fast tokenizer")
        self._loaded = Loaded.from_file(str(path))

    @property
    def vocab_size(self) -> int:
        return self._loaded.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._loaded.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._loaded.decode(list(ids), skip_special_tokens=False)


def fit(tokenizer: Tokenizer, make: Callable[[], str], length: int, *, begin: str = "", end: str = "") -> list[int]:
    """Exactly ``length`` token ids: ``begin``, pieces of ``make`` until there are enough, cut, then ``end``.

    Raises:
        ValueError: ``length`` has no room for ``begin`` and ``end``.
    """
    tail = tokenizer.encode(end) if end else []
    room = length - len(tail)
    text = begin
    ids = tokenizer.encode(text)
    if len(ids) > room:
        raise ValueError(f"{length} tokens have no room for {len(ids)} + {len(tail)} of what must be there")
    while len(ids) < room:
        piece = make()
        while len(piece) < 2 * (room - len(ids)):  # a token is seldom shorter than two characters
            piece += make()
        text += piece
        ids = tokenizer.encode(text)
    return ids[:room] + tail


def check_at_least(workload: Workload, minimum: int, *names: str) -> None:
    """Raise ValueError where a parameter is below ``minimum``."""
    for name in names:
        if getattr(workload, name) < minimum:
            raise ValueError(f"{workload.name}: {name}={getattr(workload, name)} must be at least {minimum}")
