"""Users who chat: growing histories, with time to think between the turns."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.workloads.base import ASSISTANT, Session, Tokenizer, Turn, check_at_least, fit
from bench_serving.workloads.prompts import TOOLS, AgentPrompt
from bench_serving.workloads.texts import Texts


@dataclass(frozen=True)
class MultiTurn:
    """Chats behind a system prompt.

    Attributes:
        num_users: sessions.
        num_turns: questions of each.
        system_tokens: exact length of the system prompt.
        templated: each user's prompt has a name, id and date of its own near the top; else all have the same.
        question_tokens: exact length of a question.
        document_tokens: exact length of a text that the first question is about and comes with; 0 for none.
        output_tokens: of every answer.
        think_s: mean of the exponentially distributed time before every question but the first; 0 for none.
        num_tools: in the system prompt.
    """

    num_users: int = 8
    num_turns: int = 4
    system_tokens: int = 2000
    templated: bool = False
    question_tokens: int = 60
    output_tokens: int = 32
    think_s: float = 0.0
    num_tools: int = TOOLS
    document_tokens: int = 0
    seed: int = 0
    name: str = "multi_turn"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_users", "num_turns", "output_tokens")
        check_at_least(self, 0, "think_s", "num_tools", "document_tokens")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """One session a user.

        Raises:
            ValueError: ``system_tokens`` has no room for the header and the tools.
        """
        prompt = AgentPrompt(self.seed, self.num_tools)
        found = []
        for index in range(self.num_users):
            own = Texts(f"{self.seed}/user/{index}")
            header = Texts(f"{self.seed}/header/{index if self.templated else 0}")
            system = prompt.ids(tokenizer, self.system_tokens, header)
            turns = []
            for number in range(self.num_turns):
                ids = fit(tokenizer, own.questions, self.question_tokens, begin="\n\nUser: ", end=ASSISTANT)
                if self.document_tokens and not number:
                    ids = fit(tokenizer, own.paragraph, self.document_tokens, begin="\n\nDocument:\n\n") + ids
                think = own.rng.expovariate(1 / self.think_s) if self.think_s and number else 0.0
                turns.append(Turn(tuple(ids), self.output_tokens, think))
            found.append(Session(f"user-{index}", tuple(turns), tuple(system)))
        return found
