"""SGLang's generated-shared-prefix: groups of prompts that share a system prompt, as text instead of random words."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.workloads.base import ASSISTANT, Session, Tokenizer, Turn, check_at_least, fit
from bench_serving.workloads.texts import Texts


@dataclass(frozen=True)
class SharedPrefix:
    """Sessions of one request, in an order drawn from the seed. Parameters as in SGLang's ``bench_serving``.

    Attributes:
        num_groups: system prompts.
        prompts_per_group: questions behind each.
        system_len: exact tokens of a system prompt.
        question_len: exact tokens of a question.
        output_len: tokens of every answer.
    """

    num_groups: int = 8
    prompts_per_group: int = 4
    system_len: int = 1024
    question_len: int = 128
    output_len: int = 32
    seed: int = 0
    name: str = "shared_prefix"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_groups", "prompts_per_group", "system_len", "output_len")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """``num_groups * prompts_per_group`` sessions."""
        found = []
        for group in range(self.num_groups):
            own = Texts(f"{self.seed}/group/{group}")
            system = fit(tokenizer, own.paragraph, self.system_len)
            for number in range(self.prompts_per_group):
                ids = fit(tokenizer, own.questions, self.question_len, begin="\n\nUser: ", end=ASSISTANT)
                turn = Turn(tuple(ids), self.output_len)
                found.append(Session(f"group-{group}/{number}", (turn,), tuple(system)))
        Texts(f"{self.seed}/order").rng.shuffle(found)
        return found
