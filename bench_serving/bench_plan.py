"""What the side-by-side benchmark plays, and the memory that every side gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_serving.servers import Arm, Budget, make_server, pool_dtype, server_args, values_a_token
from bench_serving.workloads import Agents, MultiTurn, Session, Tokenizer, Workload
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.serving import ServerProcess

PRESSURE, FITS, AS_IS = "pressure", "fits", "as-is"
"""Conditions; ``pressure-8`` is one with another factor, ``as-is`` whatever a server that runs already has."""
FACTOR = 4
"""Working set over all bytes of KV, under ``pressure``."""
BASELINE = "default"
ARMS = (BASELINE, "plt-raw", "plt-dense")
ALL_ARMS = (
    BASELINE,
    *(f"sglang-{policy}" for policy in ("lfu", "slru", "fifo")),
    *(f"plt-{codec}" for codec in (*CODECS, *PROFILED)),
    *(f"plt-dense-{policy}" for policy in ("lru", "slru")),
)


class BenchError(RuntimeError):
    """The benchmark cannot measure what it should; the message is one line."""


def _agents(scale: float, seed: int) -> Workload:
    return Agents(
        num_agents=max(2, round(6 * scale)),
        num_turns=4,
        preamble_tokens=320,
        num_tools=1,
        task_tokens=600,
        tool_tokens=60,
        output_tokens=8,
        branch_turns=1,
        seed=seed,
    )


def _multi_turn(scale: float, seed: int) -> Workload:
    return MultiTurn(
        num_users=max(2, round(13 * scale)),
        num_turns=4,
        system_tokens=96,
        num_tools=0,
        document_tokens=760,
        question_tokens=40,
        output_tokens=8,
        seed=seed,
    )


SIZED: dict[str, Callable[[float, int], Workload]] = {"agents": _agents, "multi_turn": _multi_turn}
"""Workloads of about the same working set, for one pool to be right for all of them; ``scale`` is of their sessions."""


@dataclasses.dataclass(frozen=True)
class Sized:
    """A workload and what it takes.

    Attributes:
        sessions: played in rounds: a turn of each, agents before what branches off them.
        working_set: distinct tokens of all prompts and answers; what sessions share counts once.
        longest: tokens of the longest history.
    """

    name: str
    sessions: tuple[Session, ...]
    working_set: int
    longest: int

    @classmethod
    def make(cls, name: str, tokenizer: Tokenizer, scale: float, seed: int) -> Sized:
        """The workload called ``name``.

        Raises:
            ValueError: its parameters do not fit together.
        """
        found = SIZED[name](scale, seed).sessions(tokenizer)
        sessions = [s for s in found if s.parent is None] + [s for s in found if s.parent is not None]
        return cls(name, tuple(sessions), *_extent(sessions))

    @property
    def num_requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def _extent(sessions: Sequence[Session]) -> tuple[int, int]:
    """Distinct tokens and the longest history; an answer is like no other."""
    seen: set[int] = set()
    longest = 0
    after: dict[tuple[str, int], tuple[int, int]] = {}
    for session in sessions:
        path, length = after[session.parent, session.parent_turns] if session.parent is not None else (0, 0)
        pieces: list[Sequence[object]] = [session.preamble]
        for index, turn in enumerate(session.turns):
            answer = [(session.name, index, place) for place in range(turn.max_new_tokens)]
            pieces += [turn.append, answer]
        for number, piece in enumerate(pieces):
            for token in piece:
                path = hash((path, token))
                seen.add(path)
            length += len(piece)
            if number % 2 == 0:
                after[session.name, number // 2] = path, length
        longest = max(longest, length)
    return len(seen), longest


@dataclasses.dataclass(frozen=True)
class Plan:
    """One model, the workloads, and a budget for each condition.

    Attributes:
        budgets: condition -> memory of every arm, see :meth:`Budget.slots`.
    """

    model_path: Path
    on_gpu: bool
    workloads: tuple[Sized, ...]
    budgets: dict[str, Budget]

    @classmethod
    def make(cls, model_path: Path, workloads: Sequence[Sized], conditions: Sequence[str], *, on_gpu: bool) -> Plan:
        """The plan for a model.

        Raises:
            BenchError: there are too few sessions for a condition.
            OSError, ValueError: as of :func:`values_a_token`; a condition is unknown.
        """
        row_bytes = values_a_token(model_path) * pool_dtype(on_gpu)[1]
        budgets = {condition: budget_of(condition, workloads, row_bytes) for condition in conditions}
        return cls(model_path, on_gpu, tuple(workloads), budgets)

    def server(self, arm: Arm, condition: str) -> ServerProcess:
        """A server that is not started yet."""
        budget = self.budgets[condition]
        args = server_args(arm, self.model_path, budget, on_gpu=self.on_gpu, equal_bytes=True)
        return make_server(args, on_gpu=self.on_gpu)


def factor_of(condition: str) -> float | None:
    """Working set over bytes that ``condition`` asks for; None for ``fits``.

    Raises:
        ValueError: there is no such condition.
    """
    if condition == FITS:
        return None
    if condition == PRESSURE:
        return FACTOR
    family, _, number = condition.partition("-")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if family != PRESSURE or not 1 < factor < 1000:
        raise ValueError(f"condition {condition!r} is unknown: {PRESSURE}, {FITS}, or {PRESSURE}-8 for another factor")
    return factor


def budget_of(condition: str, workloads: Sequence[Sized], row_bytes: int) -> Budget:
    """Memory of every arm, the same for all workloads.

    Pool and cold tier get half of the bytes each, but the pool always holds the longest history, and no less than a
    quarter is left for the cold tier. With few sessions the bytes are therefore more than asked for.

    Raises:
        BenchError: they would then hold the working set.
        ValueError: there is no such condition.
    """
    factor = factor_of(condition)
    smallest, largest = (choose(w.working_set for w in workloads) for choose in (min, max))
    longest = max(w.longest for w in workloads)
    need = longest + longest // 16 + 64
    if factor is None:
        pool = largest + largest // 4 + need
        return Budget(pool, pool * row_bytes, row_bytes)
    total = max(int(smallest / factor), need + need // 3)
    if total * 1.25 > smallest:
        raise BenchError(
            f"{condition}: the longest history has {longest} tokens, and all sessions {smallest}: too few to put "
            "memory under pressure; take a larger --scale"
        )
    pool = max(total // 2, need)
    return Budget(pool, (total - pool) * row_bytes, row_bytes)


def schedule(arms: Sequence[str], conditions: Sequence[str], repeats: int) -> list[tuple[int, str, str]]:
    """(repeat, condition, arm) in the order in which servers run.

    The order of arms is rotated by one for every repeat and condition. The first of all is one that needs a profile,
    where there is one: should it lack it, that shows at once.
    """
    first = next((index for index, arm in enumerate(arms) if Arm.parse(arm).codec in PROFILED), 0)
    found = []
    for repeat in range(repeats):
        for place, condition in enumerate(conditions):
            start = (first + repeat + place) % len(arms)
            found += [(repeat, condition, arm) for arm in (*arms[start:], *arms[:start])]
    return found
