"""The same prompt again with a date, a name or a question changed near the top."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.workloads.base import ASSISTANT, Session, Tokenizer, Turn, check_at_least, fit
from bench_serving.workloads.texts import Texts

CHANGES = ("date", "name", "question")


@dataclass(frozen=True)
class NearDuplicates:
    """For every length a document, asked about in variants of a header that takes less than 100 tokens.

    Variant 0 is the original, variant ``i`` changes what ``CHANGES[(i - 1) % 3]`` says and nothing else. The document
    has the same tokens in every variant, at positions that may differ by a few.

    Attributes:
        prompt_tokens: exact lengths of the prompts.
        num_variants: prompts of each length.
        output_tokens: of every answer.
    """

    prompt_tokens: tuple[int, ...] = (2000, 6000)
    num_variants: int = 7
    output_tokens: int = 16
    seed: int = 0
    name: str = "near_duplicates"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_variants", "output_tokens")
        if not self.prompt_tokens:
            raise ValueError(f"{self.name}: prompt_tokens is empty")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """Variants of the first length, then of the next; one request each."""
        found = []
        for length in self.prompt_tokens:
            base = Texts(f"{self.seed}/{length}")
            original = {"date": base.date(), "name": base.person(), "question": base.question()}
            for index in range(self.num_variants):
                header = dict(original)
                what = CHANGES[(index - 1) % len(CHANGES)] if index else "original"
                if index:
                    header[what] = self._other(header[what], what, Texts(f"{self.seed}/{length}/{index}"))
                ids = self._prompt(tokenizer, length, header)
                found.append(Session(f"{length}/{index}-{what}", (Turn(tuple(ids), self.output_tokens),)))
        return found

    @staticmethod
    def _other(value: str, what: str, texts: Texts) -> str:
        make = {"date": texts.date, "name": texts.person, "question": texts.question}[what]
        while (found := make()) == value:
            pass
        return found

    def _prompt(self, tokenizer: Tokenizer, length: int, header: dict[str, str]) -> list[int]:
        document = Texts(f"{self.seed}/{length}/document")
        top = f"Date: {header['date']}\nFor: {header['name']}\nQuestion: {header['question']}\n\nDocument:\n\n"
        return fit(tokenizer, document.paragraph, length, begin=top, end=ASSISTANT)
