"""A fleet of agents whose system prompts are one template with small differences near the top."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.workloads.base import ASSISTANT, Session, Tokenizer, Turn, check_at_least, fit
from bench_serving.workloads.prompts import AgentPrompt
from bench_serving.workloads.texts import Texts


@dataclass(frozen=True)
class Fleet:
    """Every session has a name, id and date of its own within the first 60 tokens, then the common template.

    Every fourth session has its tool descriptions in an order of its own. An ordinary prefix cache shares next to
    nothing between such sessions.

    Attributes:
        num_sessions: agents.
        num_turns: requests of each.
        system_tokens: exact length of each system prompt (the session's preamble).
        turn_tokens: exact length of what a turn appends.
        output_tokens: of every answer.
    """

    num_sessions: int = 16
    num_turns: int = 2
    system_tokens: int = 2000
    turn_tokens: int = 120
    output_tokens: int = 16
    seed: int = 0
    name: str = "fleet"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_sessions", "num_turns", "output_tokens")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """One session an agent.

        Raises:
            ValueError: ``system_tokens`` has no room for the header and the tools.
        """
        prompt = AgentPrompt(self.seed)
        found = []
        for index in range(self.num_sessions):
            own = Texts(f"{self.seed}/fleet/{index}")
            system = prompt.ids(tokenizer, self.system_tokens, own, shuffled=index % 4 == 3)
            turns = [self._turn(tokenizer, own) for _ in range(self.num_turns)]
            found.append(Session(f"agent-{index}", tuple(turns), tuple(system)))
        return found

    def _turn(self, tokenizer: Tokenizer, own: Texts) -> Turn:
        ids = fit(tokenizer, own.questions, self.turn_tokens, begin="\n\nUser: ", end=ASSISTANT)
        return Turn(tuple(ids), self.output_tokens)
