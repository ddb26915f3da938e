"""Agent traces from a seed, in Mooncake's format.

Sessions of a few agents: a long tool preamble that all sessions of an agent share, a header of the session's own, then
turns that append the last answer and a tool's output. Some sessions end after one request, some fork: a second session
goes on from an earlier turn. Full blocks keep their ids over the turns; a block that is not full gets a new one every
time, as in the published traces.
"""

from __future__ import annotations

import heapq
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_plt.simulate.trace import BLOCK_TOKENS

_AGENTS = 6
_ONE_SHOT = 0.35
_GOES_ON = 0.85
_FORKS = 0.06
_SESSIONS_PER_S = 0.5


class _Session:
    """A prompt that grows: ``ids`` name its full blocks."""

    def __init__(self, ids: list[int], length: int, one_shot: bool):
        self.ids, self.length, self.one_shot = ids, length, one_shot
        self.turn_lengths: list[int] = []


def agent_requests(seed: int, num_requests: int) -> Iterator[dict[str, Any]]:
    """``num_requests`` lines of a trace in order of time; the same for the same seed."""
    rng = random.Random(seed)
    next_id = 0

    def extend(session: _Session, tokens: int) -> None:
        nonlocal next_id
        session.length += tokens
        while len(session.ids) < session.length // BLOCK_TOKENS:
            session.ids.append(next_id)
            next_id += 1

    preambles = []
    for _ in range(_AGENTS):
        preamble = _Session([], 0, False)
        extend(preamble, BLOCK_TOKENS * rng.randint(4, 24))
        preambles.append(preamble.ids)

    due: list[tuple[int, int, _Session]] = []  # ms, tie, session
    arrival, count = 0, 0
    for _ in range(num_requests):
        while not due or arrival <= due[0][0]:
            count += 1
            ids = list(rng.choice(preambles))
            session = _Session(ids, len(ids) * BLOCK_TOKENS, rng.random() < _ONE_SHOT)
            extend(session, rng.randint(50, 2500))
            heapq.heappush(due, (arrival, count, session))
            arrival += 1 + int(rng.expovariate(_SESSIONS_PER_S) * 1000)
        now, _, session = heapq.heappop(due)
        output = min(4000, 1 + int(rng.lognormvariate(4.5, 1.2)))
        ids = list(session.ids)
        if session.length % BLOCK_TOKENS:
            ids.append(next_id)
            next_id += 1
        yield {"timestamp": now, "input_length": session.length, "output_length": output, "hash_ids": ids}
        session.turn_lengths.append(session.length)
        if session.one_shot or rng.random() > _GOES_ON:
            continue
        if rng.random() < _FORKS:
            length = rng.choice(session.turn_lengths)
            fork = _Session(session.ids[: length // BLOCK_TOKENS], length, False)
            extend(fork, rng.randint(50, 3000))
            count += 1
            heapq.heappush(due, (now + 1000 + int(rng.expovariate(1 / 30) * 1000), count, fork))
        tool_output = min(20_000, 20 + int(rng.lognormvariate(6.0, 1.3)))
        extend(session, output + tool_output)
        count += 1
        heapq.heappush(due, (now + 20 * output + int(rng.lognormvariate(2.5, 1.2) * 1000), count, session))


def write_agents(path: str | os.PathLike[str], seed: int, num_requests: int) -> None:
    """Write a trace of :func:`agent_requests` to ``path``.

    Raises:
        OSError: the file cannot be written.
    """
    with Path(path).open("w", encoding="utf-8") as out:
        for request in agent_requests(seed, num_requests):
            out.write(json.dumps(request) + "\n")
