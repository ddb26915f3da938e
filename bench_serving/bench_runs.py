"""Runs the servers of the side-by-side benchmark, one at a time, and keeps what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench_serving.arrivals import RoundRobin
from bench_serving.bench_files import Directory, Note, Run
from bench_serving.bench_plan import BenchError, Plan, Sized, schedule
from bench_serving.client import Options, play
from bench_serving.fleet_runs import refuse_without_profile
from bench_serving.noise import Others, load_average, probe
from bench_serving.records import Record
from bench_serving.servers import Arm
from bench_serving.streams import Api, Generate
from sglang_plt.client import Client, RequestError
from sglang_plt.serving import ServerProcess, group_members

Say = Callable[[str], None]

_WARM_UP = 4
_COUNTED = ("evict", "restore", "encode")
_SAY_EVERY = 20


def run_all(plan: Plan, run: Run, directory: Directory, repeats: int, say: Say) -> Iterator[Note]:
    """Start server after server and play all workloads on each; what is measured is kept at once.

    Raises:
        BenchError, FleetError, ServerStartError, RequestError, OSError: and everything ends.
    """
    order = schedule(run.arms, list(plan.budgets), repeats)
    for number, (repeat, condition, name) in enumerate(order, start=1):
        label = f"{number}/{len(order)} {name}, {condition}"
        arm, before, load = Arm.parse(name), probe(), load_average()
        server = plan.server(arm, condition)
        say(f"{label}: starting a server, log: {server.log_path}")
        with server:
            refuse_without_profile(server, arm)
            others = Others(_members(server))
            seconds = _play_all(
                server, Generate(), rotated(plan.workloads, repeat), directory, (name, condition, repeat), say, label
            )
            share = others.share()
            if not server.alive:
                raise BenchError(f"{label}: the server died, log: {server.log_path}")
        note = Note(repeat, condition, name, (before, probe()), (load, load_average()), share, True, seconds)
        run.notes.append(note)
        directory.write_run(run)
        yield note


def run_url(
    client: Client, api: Api, workloads: Sequence[Sized], run: Run, directory: Directory, repeats: int, say: Say
) -> Iterator[Note]:
    """The same for one server that runs already; a cache that cannot be emptied is measured as it is.

    Raises:
        OSError: the records cannot be written.
    """
    (name,), (condition,) = run.arms, run.conditions
    for repeat in range(repeats):
        before, load = probe(), load_average()
        flushed = _flushes(client)
        if not flushed:
            say(f"{client.url} has no /flush_cache: its cache is used as it is")
        what = name, condition, repeat
        seconds = _play_all(client, api, rotated(workloads, repeat), directory, what, say, name, flush=flushed)
        note = Note(repeat, condition, name, (before, probe()), (load, load_average()), None, flushed, seconds)
        run.notes.append(note)
        directory.write_run(run)
        yield note


def rotated(workloads: Sequence[Sized], repeat: int) -> list[Sized]:
    """Workloads in the order of a repeat."""
    start = repeat % len(workloads)
    return [*workloads[start:], *workloads[:start]]


def _play_all(
    client: Client,
    api: Api,
    workloads: Sequence[Sized],
    directory: Directory,
    what: tuple[str, str, int],
    say: Say,
    label: str,
    *,
    flush: bool = True,
) -> dict[str, dict[str, float]]:
    """Play workload after workload; seconds that the server counts meanwhile."""
    name, condition, repeat = what
    found = {}
    options = Options(client.url, api)
    # first uses of code are nobody's latency; what cannot be flushed must not be known when it is measured
    play(workloads[0].sessions[:1] if flush else (), Options(client.url, api, warm_up=_WARM_UP), RoundRobin())
    for workload in workloads:
        if flush:
            client.flush_cache()
        before = _counters(client)
        done: list[Record] = []

        def on_record(record: Record, workload: Sized = workload, done: list[Record] = done) -> None:
            done.append(record)
            if len(done) % _SAY_EVERY == 0 or len(done) == workload.num_requests:
                failed = sum(not r.ok for r in done)
                ending = f", {failed} failed" if failed else ""
                say(f"{label}: {workload.name}, {len(done)} of {workload.num_requests} requests{ending}")

        play(workload.sessions, options, RoundRobin(), on_record)
        after = _counters(client)
        directory.write((workload.name, name, condition), repeat, done)
        if after:
            found[workload.name] = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return found


def _counters(client: Client) -> dict[str, float]:
    """Seconds so far by what took them; empty where the server does not count them."""
    try:
        metrics = client.metrics()
    except (RequestError, OSError):
        return {}
    return {name: metrics[f"{name}_seconds_sum"] for name in _COUNTED if f"{name}_seconds_sum" in metrics}


def _flushes(client: Client) -> bool:
    try:
        client.flush_cache()
    except (RequestError, OSError):
        return False
    return True


def _members(server: ServerProcess) -> Callable[[], list[int]]:
    return lambda: group_members(server.process.pid) if server.process is not None else []
