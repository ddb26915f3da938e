"""The side stream of a GPU, over a module that notes what it is asked for."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sglang_plt.host.side_stream import DeviceSideStream


class Stream:
    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.behind}")


class Event:
    behind = ""

    def record(self, stream: Stream) -> None:
        self.behind = f"an event of {stream.name}"


class Module:
    """In place of ``torch.cuda``."""

    Event = Event

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = Stream("main", self.log)

    def Stream(self, device: torch.device) -> Stream:
        return Stream("side", self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream):
        before, self.now = self.now, stream
        yield
        self.now = before


def test_the_side_stream_waits_when_it_starts_and_not_when_it_goes_on():
    module = Module()
    side = DeviceSideStream(torch.device("cuda"), module)
    with side.started():
        assert module.now.name == "side"
    with side.resumed():
        assert module.now.name == "side"
    side.wait(side.record())
    assert module.now.name == "main"
    assert module.log == ["side waits for main", "main waits for an event of side"]


def test_memory_of_slots_is_kept():
    kept = []
    side = DeviceSideStream(torch.device("cuda"), Module())
    side.keep(SimpleNamespace(record_stream=kept.append))
    assert [stream.name for stream in kept] == ["side"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    device = torch.device("cuda")
    side, rows = DeviceSideStream(device), torch.zeros(1 << 20, device=device)
    with side.started():
        side.keep(rows)
        for _ in range(50):
            rows += 1
    side.wait(side.record())
    assert bool((rows.clone() == 50).all())
