"""Agents at work: a tool preamble that all share, tool outputs, forks, and sub-agents that inherit a context."""

from __future__ import annotations

from dataclasses import dataclass

from bench_serving.workloads.base import ASSISTANT, Session, Tokenizer, Turn, check_at_least, fit
from bench_serving.workloads.prompts import TOOLS, AgentPrompt
from bench_serving.workloads.texts import Texts


@dataclass(frozen=True)
class Agents:
    """Each agent gets a task, then tool outputs, JSON and code by turns; some of its turns are branched off.

    A *fork* goes on from an earlier turn with another tool output. A *sub-agent* inherits the whole context so far,
    gets a task of its own, and does not report back.

    Attributes:
        num_agents: sessions that start from the preamble.
        num_turns: requests of each, at least 2.
        preamble_tokens: exact length of the common preamble of instructions and tools.
        task_tokens: exact length of a task, which is the first turn.
        tool_tokens: least tokens of a tool output; outputs are whole, so they may be up to twice as long.
        output_tokens: of every answer.
        num_forks: forks of each agent.
        num_sub_agents: sub-agents of each agent.
        branch_turns: requests of each fork and sub-agent.
        tool_s: mean time that a tool takes, exponentially distributed; 0 for none.
        num_tools: in the preamble.
    """

    num_agents: int = 4
    num_turns: int = 4
    preamble_tokens: int = 2000
    task_tokens: int = 80
    tool_tokens: int = 300
    output_tokens: int = 32
    num_forks: int = 1
    num_sub_agents: int = 1
    branch_turns: int = 2
    tool_s: float = 0.0
    num_tools: int = TOOLS
    seed: int = 0
    name: str = "agents"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_agents", "output_tokens", "branch_turns")
        check_at_least(self, 2, "num_turns")
        check_at_least(self, 0, "num_forks", "num_sub_agents", "tool_s", "num_tools")

    def sessions(self, tokenizer: Tokenizer) -> list[Session]:
        """Agents, each followed by what branches off it.

        Raises:
            ValueError: ``preamble_tokens`` has no room for the header and the tools.
        """
        preamble = AgentPrompt(self.seed, self.num_tools).ids(
            tokenizer, self.preamble_tokens, Texts(f"{self.seed}/header")
        )
        found = []
        for index in range(self.num_agents):
            own = Texts(f"{self.seed}/agent/{index}")
            name = f"agent-{index}"
            turns = [self._task(tokenizer, own, "User"), *self._tools(tokenizer, own, self.num_turns - 1)]
            found.append(Session(name, tuple(turns), tuple(preamble)))
            for number in range(self.num_forks):
                turns = self._tools(tokenizer, own, self.branch_turns)
                start = own.rng.randrange(1, self.num_turns)
                found.append(Session(f"{name}/fork-{number}", tuple(turns), parent=name, parent_turns=start))
            for number in range(self.num_sub_agents):
                task = self._task(tokenizer, own, "You are a sub-agent now. Your task")
                turns = [task, *self._tools(tokenizer, own, self.branch_turns - 1)]
                start = own.rng.randrange(1, self.num_turns)
                found.append(Session(f"{name}/sub-{number}", tuple(turns), parent=name, parent_turns=start))
        return found

    def _task(self, tokenizer: Tokenizer, own: Texts, who: str) -> Turn:
        ids = fit(tokenizer, own.questions, self.task_tokens, begin=f"\n\n{who}: ", end=ASSISTANT)
        return Turn(tuple(ids), self.output_tokens)

    def _tools(self, tokenizer: Tokenizer, own: Texts, count: int) -> list[Turn]:
        turns = []
        for _ in range(count):
            output = self._json(tokenizer, own) if own.rng.random() < 0.6 else self._code(tokenizer, own)
            think = own.rng.expovariate(1 / self.tool_s) if self.tool_s else 0.0
            turns.append(Turn(tuple(tokenizer.encode(output + ASSISTANT)), self.output_tokens, think))
        return turns

    def _json(self, tokenizer: Tokenizer, own: Texts) -> str:
        entries, state = 1, own.rng.getstate()
        while True:
            own.rng.setstate(state)  # the same answer with one entry more
            text = f"\n\nTool result:\n{own.tool_output(entries)}"
            if len(tokenizer.encode(text)) >= self.tool_tokens:
                return text
            entries += 1

    def _code(self, tokenizer: Tokenizer, own: Texts) -> str:
        text = "\n\nTool result:\n```python\n"
        while len(tokenizer.encode(text)) < self.tool_tokens:
            text += own.code()
        return text.rstrip() + "\n```"
