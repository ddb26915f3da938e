"""What the fleet benchmark does with one running server.

Every run plays the system prompts alone, each once, and then the turns of all sessions in turn: *phase 2*, which hit
rate and latencies are of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench_serving import divergence
from bench_serving.arrivals import RoundRobin
from bench_serving.client import Options, Result, play
from bench_serving.divergence import Tops
from bench_serving.metrics import bootstrap, rows_of
from bench_serving.records import Record
from bench_serving.servers import Arm, Budget, make_server, quarter_budget, server_args, values_a_token
from bench_serving.servers import pool_dtype as dtype_of
from bench_serving.workloads import Session, Tokenizer, Turn
from bench_serving.workloads.fleet import Fleet
from sglang_plt.cli.tree import fetch
from sglang_plt.config import PROFILED
from sglang_plt.results import Row
from sglang_plt.serving import ServerProcess

EQUAL_BYTES = "@equal-bytes"
BF16_BYTES = 2
_SLACK = 1024
_ALL_HELD = 0.999
_MAX_ROWS = 100_000
MEASURE_FLAGS = ("--plt-policy", "lru", "--plt-write-ahead", "0")
"""So that a token has encoded bytes if and only if eviction took it once, and eviction goes by age."""

Say = Callable[[str], None]


class FleetError(RuntimeError):
    """The benchmark cannot measure what it should; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """One fleet, one model, and the memory that arms get.

    Attributes:
        half: pool and cold tier of an arm with ``@equal-bytes``; together a quarter of the working set.
    """

    model_path: Path
    on_gpu: bool
    sessions: list[Session]
    values: int
    half: Budget

    @classmethod
    def make(cls, model_path: Path, tokenizer: Tokenizer, fleet: Fleet, *, on_gpu: bool) -> Plan:
        """The plan for a model.

        Raises:
            OSError, ValueError: as of :func:`values_a_token` and of the workload.
        """
        sessions, values = fleet.sessions(tokenizer), values_a_token(model_path)
        sizes = [session.own_tokens for session in sessions]
        half = quarter_budget(max(sizes), sum(sizes), values * dtype_of(on_gpu)[1])
        return cls(model_path, on_gpu, sessions, values, half)

    @property
    def working_set(self) -> int:
        """Tokens of all sessions at their end."""
        return sum(session.own_tokens for session in self.sessions)

    @property
    def pool_tokens(self) -> int:
        """Slots of the pool of every arm that is not ``@equal-bytes``: about a quarter of the working set."""
        return self.half.slots(Arm("default"), equal_bytes=True)

    def reference_server(self) -> ServerProcess:
        """SGLang's own cache, large enough that nothing is ever evicted."""
        return self._server(Arm("default"), Budget(self.working_set + _SLACK, 0, self.half.row_bytes))

    def measuring_server(self, arm: Arm) -> ServerProcess:
        """The small pool, and a cold tier that holds everything even as plain rows."""
        cold = (2 * self.working_set + _SLACK) * self.half.row_bytes
        return self._server(arm, Budget(self.pool_tokens, cold, self.half.row_bytes), MEASURE_FLAGS)

    def equal_server(self, arm: Arm) -> ServerProcess:
        """As the arm would be used, with KV of as many bytes as every other arm."""
        return self._server(arm, self.half, equal_bytes=True)

    def _server(
        self, arm: Arm, budget: Budget, more: tuple[str, ...] = (), *, equal_bytes: bool = False
    ) -> ServerProcess:
        args = server_args(arm, self.model_path, budget, on_gpu=self.on_gpu, equal_bytes=equal_bytes, more=more)
        return make_server(args, on_gpu=self.on_gpu)


@dataclass(frozen=True)
class Reference:
    """What a server without eviction says.

    Attributes:
        records: of phase 2.
        tops: of each session, behind its system prompt.
    """

    records: list[Record]
    tops: list[Tops]


@dataclass(frozen=True)
class Held:
    """What the cold tier holds.

    Attributes:
        tokens: with encoded rows, whether they are in the pool as well or not.
        num_bytes: of their blocks.
        share: ``tokens`` over all tokens of the cache.
    """

    tokens: int
    num_bytes: int
    share: float


def run_phases(plan: Plan, server: ServerProcess, say: Say, between: Callable[[Result], None] | None = None) -> Result:
    """Both phases on an empty cache; returns phase 2.

    Args:
        between: called with the result of the first, after it.
    """
    options = Options(server.url)
    server.flush_cache()
    say("system prompts")
    first = play([Session(s.name, (Turn(s.preamble, 1),)) for s in plan.sessions], options, RoundRobin())
    if between is not None:
        between(first)
    say("turns")
    return play(plan.sessions, options, RoundRobin())


def probe(plan: Plan, server: ServerProcess) -> list[Tops]:
    """Each session's first question, teacher-forced behind its system prompt out of the cache."""
    return [divergence.teacher_forced(server, s.preamble, s.turns[0].append) for s in plan.sessions]


def reference_run(plan: Plan, server: ServerProcess, say: Say) -> Reference:
    """What all arms are compared with."""
    second = run_phases(plan, server, say)
    if failed := [record for record in second.records if not record.ok]:
        raise FleetError(f"{failed[0].session}, turn {failed[0].turn}, failed without eviction: {failed[0].error}")
    say("distributions")
    return Reference(second.records, probe(plan, server))


def plain_run(plan: Plan, server: ServerProcess, arm: str, reference: Reference, say: Say) -> list[Row]:
    """Phase 2 alone, as rows."""
    return rows_of(run_phases(plan, server, say).records, arm, reference=reference.records)


def measuring_run(plan: Plan, server: ServerProcess, arm: str, reference: Reference, say: Say) -> list[Row]:
    """Phase 2, the bytes of what was evicted, and the divergence behind it.

    ``bf16_over_bytes_template``, of the system prompts alone, and ``bf16_over_bytes_overall``, of everything: bytes of
    the held tokens as bfloat16 over the bytes of their blocks, headers and references included. ``demoted_share`` is
    the share of all cached tokens that this covers. ``kl_warm_cold`` is a lower bound, see
    :mod:`bench_serving.divergence`.
    """
    rows: list[Row] = []

    def ratio(what: str, result: Result) -> None:
        say(f"demoting and counting ({what})")
        held = demote_all(plan, server, result)
        if not held.num_bytes:
            raise FleetError(f"{arm}: nothing was evicted; the pool is too large for the sessions")
        value = held.tokens * plan.values * BF16_BYTES / held.num_bytes
        rows.append(Row(f"bf16_over_bytes_{what}", arm, value, "1", n=held.tokens))
        rows.append(Row(f"cold_bytes_{what}", arm, held.num_bytes, "bytes", n=held.tokens))
        rows.append(Row(f"demoted_share_{what}", arm, held.share, "1", n=held.tokens))

    second = run_phases(plan, server, say, lambda first: ratio("template", first))
    ratio("overall", second)
    say("distributions")
    pairs = zip(reference.tops, probe(plan, server), strict=True)
    means = [[divergence.mean_kl(exact, ours)] for exact, ours in pairs]
    lo, hi = bootstrap(means, _mean) or (None, None)
    rows.append(Row("kl_warm_cold", arm, _mean(np.array(means)), "nats", lo, hi, len(means)))
    return rows + rows_of(second.records, arm, reference=reference.records)


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def demote_all(plan: Plan, server: ServerProcess, result: Result) -> Held:
    """Ask for old prefixes until eviction has taken everything once; what is asked for comes back and keeps its blocks.

    No filler is needed, so none has to be subtracted. Twice round is always enough with :data:`MEASURE_FLAGS`.
    """
    asked, held = 0, held_by(server)
    for _ in range(2):
        for name, history in result.histories.items():
            if asked > plan.pool_tokens and held.share >= _ALL_HELD:
                return held
            if len(history) > 1:  # the last token of an answer is in no cache
                session = Session(name, (Turn(tuple(history[:-1]), 1),))
                play([session], Options(server.url), RoundRobin())
                asked += len(history)
                held = held_by(server)
    return held


def held_by(server: ServerProcess) -> Held:
    """What the cold tier of an idle server holds, by its tree and its metrics (of tensor-parallel rank 0)."""
    (tree,) = fetch(server.url, _MAX_ROWS)
    tokens = sum(
        row["len"] for row in tree["nodes"] if row["tier"] == "cold" or (row["tier"] == "hot" and row["written"])
    )
    cached = tree["tokens"]["hot"] + tree["tokens"]["cold"]
    return Held(tokens, int(server.metrics()["cold_bytes"]), tokens / max(1, cached))


def refuse_without_profile(server: ServerProcess, arm: Arm) -> None:
    """A codec that still learns its profile stores something else meanwhile, which is not what is to be measured.

    Raises:
        FleetError: names the remedy.
    """
    if arm.codec in PROFILED and re.search(rf"; {arm.codec} after \d+ tokens", server.log_text()):
        raise FleetError(f"{arm.name} has no profile: run sglang-plt calibrate with the same --model-path first")
