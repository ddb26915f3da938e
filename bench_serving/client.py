"""Plays sessions against a server over HTTP: open or closed loop, every request a record, failed or not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import aiohttp

from bench_serving.arrivals import Arrivals, ClosedLoop, RoundRobin, start_times
from bench_serving.records import Record
from bench_serving.streams import Answer, AnswerError, Api, Generate, events
from bench_serving.workloads import Session

_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Options:
    """How to ask.

    Attributes:
        url: of the server, for example ``http://127.0.0.1:30000``.
        api: :class:`Generate` or :class:`Completions`.
        timeout_s: of a whole request; one that takes longer has failed.
        warm_up: requests before the run that are not recorded; one that fails is ignored.
    """

    url: str
    api: Api = field(default_factory=Generate)
    timeout_s: float = 600.0
    warm_up: int = 0


@dataclass(frozen=True)
class Result:
    """What a run left.

    Attributes:
        records: one for each turn of each session, in the order in which they ended.
        histories: session -> token ids of all that was asked and answered.
    """

    records: list[Record]
    histories: dict[str, list[int]]


def play(
    sessions: Sequence[Session],
    options: Options,
    arrivals: Arrivals,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Result:
    """Play all sessions and return when the last has ended.

    A request that fails ends its session, and what branches off later: turns that are then not sent become records with
    an error as well. No failure of the server raises.

    Args:
        on_record: called after every request.

    Raises:
        ValueError: names repeat, a session has no turn, a parent does not come before its child or has too few turns,
            or a session lacks the ``start_s`` that :class:`Timestamps` needs.
    """
    _check(sessions)
    return asyncio.run(_Player(sessions, options, on_record).run(arrivals, start_times(sessions, arrivals)))


def _check(sessions: Sequence[Session]) -> None:
    turns: dict[str, int] = {}
    for session in sessions:
        if session.name in turns:
            raise ValueError(f"two sessions are named {session.name}")
        if not session.turns:
            raise ValueError(f"{session.name} has no turn")
        if session.parent is not None and session.parent_turns > turns.get(session.parent, -1):
            raise ValueError(f"{session.name} needs {session.parent_turns} turns of {session.parent} before it")
        turns[session.name] = len(session.turns)


class _State:
    """A session at work. ``after[n]`` is the length of the history after n turns, None where a turn failed."""

    def __init__(self, session: Session):
        loop = asyncio.get_running_loop()
        self.history: list[int] = []
        self.after: list[asyncio.Future[int | None]] = [loop.create_future() for _ in range(len(session.turns) + 1)]


class _Player:
    def __init__(self, sessions: Sequence[Session], options: Options, on_record: Callable[[Record], None]):
        self._sessions = sessions
        self._options = options
        self._on_record = on_record
        self._records: list[Record] = []
        self._states: dict[str, _State] = {}

    async def run(self, arrivals: Arrivals, starts: Sequence[float]) -> Result:
        self._states = {session.name: _State(session) for session in self._sessions}
        no_limit = aiohttp.ClientTimeout(total=None)
        # a connection kept alive may be closed by the server while the next request is being written
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(self._options.url, timeout=no_limit, connector=connector) as self._http:
            for index in range(self._options.warm_up):
                ids = [random.Random(index).randrange(256, 1024) for _ in range(_WARM_UP_TOKENS)]
                await self._ask("warm-up", index, ids, 2)
            if isinstance(arrivals, RoundRobin):
                await self._round_robin()
            else:
                await self._all(arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None, starts)
        return Result(self._records, {name: state.history for name, state in self._states.items()})

    async def _round_robin(self) -> None:
        depth: dict[str, int] = {}
        for session in self._sessions:
            depth[session.name] = depth[session.parent] + session.parent_turns if session.parent is not None else 0
        steps = [
            (depth[session.name] + turn, index, turn)
            for index, session in enumerate(self._sessions)
            for turn in range(len(session.turns))
        ]
        for _, index, turn in sorted(steps):
            session = self._sessions[index]
            if turn == 0:
                await self._begin(session)
            await self._turn(session, turn)

    async def _all(self, concurrency: int | None, starts: Sequence[float]) -> None:
        slots: AbstractAsyncContextManager = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        began = time.perf_counter()

        async def whole(session: Session, start: float) -> None:
            await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
            await self._begin(session)  # a child waits for its parent before it takes a slot
            async with slots:
                for turn in range(len(session.turns)):
                    if self._alive(session, turn):
                        await asyncio.sleep(session.turns[turn].think_s)
                    await self._turn(session, turn)

        # TaskGroup: an error of our own ends the run instead of leaving children to wait for it
        async with asyncio.TaskGroup() as group:
            for session, start in zip(self._sessions, starts, strict=True):
                group.create_task(whole(session, start))

    # -- one session ----------------------------------------------------------------------------------------------

    async def _begin(self, session: Session) -> None:
        state = self._states[session.name]
        length: int | None = 0
        if session.parent is not None:
            parent = self._states[session.parent]
            length = await parent.after[session.parent_turns]
            state.history = parent.history[:length] if length is not None else []
        if length is not None:
            state.history += session.preamble
            length = len(state.history)
        state.after[0].set_result(length)

    def _alive(self, session: Session, turn: int) -> bool:
        return self._states[session.name].after[turn].result() is not None

    async def _turn(self, session: Session, index: int) -> None:
        state, turn = self._states[session.name], session.turns[index]
        if self._alive(session, index):
            record = await self._ask(session.name, index, state.history + list(turn.append), turn.max_new_tokens)
        else:
            what = "an earlier turn failed" if index or session.parent is None else f"{session.parent} failed"
            record = Record(session.name, index, 0, time.time(), 0.0, error=f"not sent: {what}")
        if record.ok:
            state.history += [*turn.append, *record.output_ids]
        state.after[index + 1].set_result(len(state.history) if record.ok else None)
        self._records.append(record)
        self._on_record(record)

    async def _ask(self, name: str, turn: int, prompt: list[int], max_new_tokens: int) -> Record:
        api, answer, error = self._options.api, Answer(), None
        started_at, started = time.time(), time.perf_counter()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                async with self._http.post(api.path, json=api.payload(prompt, max_new_tokens)) as response:
                    if response.status != 200:
                        raise AnswerError(
                            f"status {response.status}: {' '.join((await response.text()).split())[:300]}"
                        )
                    async for event in events(response.content.iter_any()):
                        api.read(event, answer, time.perf_counter())
            if not answer.finished:
                raise AnswerError("the answer broke off")
        except TimeoutError:
            error = f"no whole answer after {self._options.timeout_s:g} s"
        except AnswerError as problem:
            error = str(problem)
        except (aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        ended = answer.last if error is None and answer.ids else time.perf_counter()
        return Record(
            session=name,
            turn=turn,
            prompt_tokens=len(prompt),
            started_at=started_at,
            e2e_s=ended - started,
            ttft_s=answer.first - started if answer.first is not None else None,
            inter_token_s=tuple(answer.gaps),
            output_ids=tuple(answer.ids),
            cached_tokens=answer.cached,
            cached_tokens_details=answer.details,
            error=error,
        )
