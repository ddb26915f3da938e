"""System prompts that are one template, and differ in who, when and which near the top."""

from __future__ import annotations

import json
from typing import Any

from bench_serving.workloads.base import Tokenizer, fit
from bench_serving.workloads.texts import Texts

TOOLS = 8


class AgentPrompt:
    """A template of an agent's system prompt: a header, tool descriptions, then rules and an example.

    Args:
        seed: of everything but what :meth:`ids` is given.
        num_tools: how many it describes, each in about 150 tokens.
    """

    def __init__(self, seed: int | str, num_tools: int = TOOLS):
        texts = Texts(f"{seed}/template")
        self._company = texts.company()
        self._tools = texts.tools(num_tools)
        self._seed = seed

    def ids(self, tokenizer: Tokenizer, length: int, header: Texts, shuffled: bool = False) -> list[int]:
        """Exactly ``length`` token ids.

        Args:
            header: gives name, id and date, within the first 60 tokens.
            shuffled: the tools are in an order of their own.
        """
        tools = header.rng.sample(self._tools, len(self._tools)) if shuffled else self._tools
        rules = Texts(f"{self._seed}/rules")
        numbers = iter(range(1, 1_000_000))

        def more() -> str:
            number = next(numbers)
            if number % 8 == 0:
                example = rules.tool_output(1)
                return f"\nExample {number // 8}. A tool answers:\n{example}\nYou write: {rules.rule()}\n"
            return f"{number}. {rules.rule()}\n"

        return fit(tokenizer, more, length, begin=self._top(header) + self._tool_part(tools))

    def _top(self, header: Texts) -> str:
        return (
            f"You are {header.person()}, agent {header.ident()} of {self._company}. Today is {header.date()}. "
            "You help the employees and customers of the company. You work with tools, and you say so when a tool "
            "did not give you what you needed.\n\n"
        )

    @staticmethod
    def _tool_part(tools: list[dict[str, Any]]) -> str:
        lines = "\n".join(json.dumps(tool) for tool in tools)
        return f"# Tools\nCall a tool with one JSON object on a line of its own.\n{lines}\n\n# Rules\n"
