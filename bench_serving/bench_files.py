"""The directory of a benchmark: ``run.json`` and ``records/<workload>/<arm>/<condition>/<repeat>.jsonl``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from bench_serving.noise import OTHERS_LIMIT, PROBE_LIMIT
from bench_serving.records import Record, read_records, write_records

RUN = "run.json"
Key = tuple[str, str, str]
"""Workload, arm, condition."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What is known of one server beside its requests.

    Attributes:
        probe_s: seconds of the CPU probe, before and after.
        load: load average of a minute, before and after.
        others: share of the cores' time that others had meanwhile; None where that is unknown.
        flushed: whether the cache was emptied before every workload.
        seconds: workload -> seconds that ``evict`` and ``restore`` added to scheduling steps, and that ``encode`` took
            beside them, where it counts them.
    """

    repeat: int
    condition: str
    arm: str
    probe_s: Sequence[float]
    load: Sequence[float]
    others: float | None = None
    flushed: bool = True
    seconds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Run:
    """How a benchmark was run.

    Attributes:
        setup: lines for readers: model, machine, versions.
        command: arguments that it was started with.
        workloads: name -> ``sessions``, ``requests``, ``working_set`` and ``longest``.
        conditions: name -> ``pool_tokens``, ``cold_bytes`` and ``row_bytes`` of arms with a cold tier.
        arms: in the order of tables.
        notes: of the servers that have been measured.
    """

    setup: list[str]
    command: str
    workloads: dict[str, dict[str, int]]
    conditions: dict[str, dict[str, int]]
    arms: list[str]
    notes: list[Note] = dataclasses.field(default_factory=list)

    def total_bytes(self, condition: str) -> int | None:
        """Bytes of KV that every arm has; None where that is unknown."""
        sizes = self.conditions[condition]
        return sizes["pool_tokens"] * sizes["row_bytes"] + sizes["cold_bytes"] if sizes else None

    def pressure(self, workload: str, condition: str) -> float | None:
        """Working set over all bytes; None where that is unknown."""
        total = self.total_bytes(condition)
        if total is None:
            return None
        return self.workloads[workload]["working_set"] * self.conditions[condition]["row_bytes"] / total

    def probe_ratio(self, note: Note) -> float:
        """The slower probe of a server over the fastest of the run."""
        return max(note.probe_s) / min(time for other in self.notes for time in other.probe_s)

    def disturbed(self, note: Note) -> bool:
        """Whether something else used the machine; see :mod:`bench_serving.noise`."""
        return self.probe_ratio(note) > PROBE_LIMIT or (note.others is not None and note.others > OTHERS_LIMIT)


Found = dict[Key, dict[int, list[Record]]]
"""Records by repeat."""


class Directory:
    """Where a benchmark is kept; made when missing."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def records_path(self, key: Key, repeat: int) -> Path:
        return self.root.joinpath("records", *key, f"{repeat}.jsonl")

    def write(self, key: Key, repeat: int, records: Sequence[Record]) -> None:
        """Keep the records of one workload on one server."""
        path = self.records_path(key, repeat)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(path, records)

    def write_run(self, run: Run) -> None:
        partial = self.root / f".{RUN}"
        partial.write_text(json.dumps(dataclasses.asdict(run), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(self.root / RUN)

    def read(self) -> tuple[Run, Found]:
        """All that was kept.

        Raises:
            OSError: a file cannot be read.
            ValueError: one holds something else.
        """
        path = self.root / RUN
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            notes = [Note(**note) for note in values.pop("notes")]
            run = Run(**values, notes=notes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} does not describe a benchmark: {error}") from None
        found: Found = {}
        for workload in run.workloads:
            for arm in run.arms:
                for condition in run.conditions:
                    key = workload, arm, condition
                    files = self.records_path(key, 0).parent.glob("*.jsonl")
                    repeats = {int(file.stem): read_records(file) for file in files if file.stem.isdigit()}
                    if repeats := {number: records for number, records in sorted(repeats.items()) if records}:
                        found[key] = repeats
        return run, found
