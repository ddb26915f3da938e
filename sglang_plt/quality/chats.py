"""Conversations with a system prompt, tools and their JSON, made of the standard library's docstrings, from a seed."""

from __future__ import annotations

import ast
import inspect
import json
import random
from collections.abc import Iterator
from typing import Any

from sglang_plt.quality.library import library_sources

_ANSWER_CHARS = (80, 900)
_QUESTIONS = {
    "evaluation": (
        "What does {name} in the module {module} do?",
        "Could you explain {name} from {module} to me, please?",
        "I found {name} in {module}. When would I use it?",
        "And how does {name} behave? It is in {module}.",
        "My colleague told me to look at {module}.{name}. What is it for?",
        "Thanks, that helps. What about {name} in {module}?",
    ),
    "calibration": (
        "Tell me about {module}.{name}, in your own words.",
        "We call {name} of {module} in our service. What should I know before I change that call?",
        "Now {name}. What are its arguments, and what can go wrong?",
        "Good. Then please describe {name} ({module}) for a new employee.",
        "Is {module}.{name} the right choice when several threads are involved?",
        "Why would anybody need {name}?",
    ),
}
_SYSTEM = {
    "evaluation": (
        "You are a patient assistant who answers questions about the Python standard library. Look things up with "
        'tools where you can. Tools: {"name": "lookup", "parameters": {"module": "string", "name": "string"}}'
    ),
    "calibration": (
        "You are the documentation agent of a software team. Keep answers short and exact, state your assumptions, "
        "and say so when you do not know. You can call these functions by writing one JSON object on its own line:\n"
        '[{"function": "find_symbol", "arguments": {"symbol": "str", "package": "str"}},\n'
        ' {"function": "open_ticket", "arguments": {"title": "str", "body": "str", "assignee": "str"}}]'
    ),
}
_CITIES = ("Oslo", "Lyon", "Porto", "Gdansk", "Kyoto", "Lima", "Accra", "Perth")
_STATES = ("open", "packed", "shipped", "delayed", "closed", "waiting for review")


def conversations(tokenizer: Any, split: str, chars: int) -> Iterator[str]:
    """Conversations of at least ``chars`` characters in the model's chat format, until the docstrings are used up."""
    rng = random.Random(split)
    facts = _docstrings(split)
    rng.shuffle(facts)
    messages = [{"role": "system", "content": _SYSTEM[split]}]
    held = 0
    for module, name, answer in facts:
        question = rng.choice(_QUESTIONS[split]).format(module=module, name=name)
        turn = [{"role": "user", "content": question}]
        if rng.random() < 0.3:
            turn += _tool_call(rng, split, module, name)
        turn.append({"role": "assistant", "content": answer})
        messages += turn
        held += sum(len(message["content"]) for message in turn)
        if held >= chars:
            yield _format(tokenizer, messages)
            messages, held = messages[:1], 0


def _tool_call(rng: random.Random, split: str, module: str, name: str) -> list[dict[str, str]]:
    if split == "evaluation":
        call = {"name": "lookup", "arguments": {"module": module, "name": name}}
        result: Any = {"found": True, "line": rng.randrange(1, 3000), "version": f"3.{rng.randrange(5, 13)}"}
    else:
        call = {"function": "find_symbol", "arguments": {"symbol": name, "package": module}}
        result = [
            {
                "ticket": rng.randrange(10_000, 99_999),
                "office": rng.choice(_CITIES),
                "state": rng.choice(_STATES),
                "hours": round(rng.uniform(0.2, 90), 1),
            }
            for _ in range(rng.randrange(1, 6))
        ]
    return [
        {"role": "assistant", "content": json.dumps(call)},
        {"role": "user", "content": "Result: " + json.dumps(result, indent=rng.choice((None, 1)))},
    ]


def _docstrings(split: str) -> list[tuple[str, str, str]]:
    """(module, name, docstring) of public functions, classes and methods; read from source, so nothing is imported."""
    found = []
    for path in library_sources(split):
        module = path.stem if path.name != "__init__.py" else path.parent.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                answer = inspect.cleandoc(ast.get_docstring(node) or "")
                if _ANSWER_CHARS[0] <= len(answer) <= _ANSWER_CHARS[1]:
                    found.append((module, node.name, answer))
    return found


def _format(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n\n".join(f"{message['role'].title()}: {message['content']}" for message in messages)
