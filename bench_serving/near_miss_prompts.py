"""Prompts of one length that differ in a date and a name near their top."""

from __future__ import annotations

from itertools import count

from bench_serving.workloads import Tokenizer
from bench_serving.workloads.base import ASSISTANT, fit
from bench_serving.workloads.texts import Texts


class Prompts:
    """A donor, and as many variants as are asked for, each once.

    Args:
        length: tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int):
        self.length = length
        self._tokenizer = tokenizer
        self._seed = f"{seed}/{length}"
        self._numbers = count(1)
        self.donor = self._prompt(0)

    def variant(self) -> list[int]:
        """Another date and another name."""
        return self._prompt(next(self._numbers))

    def unrelated(self) -> list[int]:
        """Another text altogether."""
        number = next(self._numbers)
        texts = Texts(f"{self._seed}/unrelated/{number}")
        return fit(self._tokenizer, texts.paragraph, self.length, begin=f"{texts.date()}, {texts.ident()}: ")

    def exact_hit(self, num_new: int) -> list[int]:
        """The donor but for the last ``num_new`` tokens, which are new."""
        texts = Texts(f"{self._seed}/tail/{next(self._numbers)}")
        return [*self.donor[: self.length - num_new], *fit(self._tokenizer, texts.paragraph, num_new)]

    def changed(self, changes: int) -> list[int]:
        """A variant in which ``changes`` tokens of the text differ as well, evenly from its tenth to its middle."""
        ids = self.variant()
        for number in range(changes - 1):
            at = self.length // 10 + number * self.length // (3 * changes)
            ids[at] = 1000 + 37 * number
        return ids

    def continuation(self, number: int, num_tokens: int) -> list[int]:
        """What an answer may be: text of the same kind."""
        texts = Texts(f"{self._seed}/answer/{number}")
        return fit(self._tokenizer, texts.paragraph, num_tokens)

    def _prompt(self, number: int) -> list[int]:
        header, document = Texts(f"{self._seed}/header/{number}"), Texts(f"{self._seed}/document")
        top = f"You are an assistant. Today is {header.date()}. You answer questions of {header.person()}.\n\n"
        return fit(self._tokenizer, document.paragraph, self.length, begin=top, end=ASSISTANT)
