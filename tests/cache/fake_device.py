"""A device that does nothing until it is run, and then in any order that its streams and events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SCHEDULE, FORWARD, SIDE = "schedule", "forward", "side"


class Event:
    """Happens when the device gets to it."""

    def __init__(self) -> None:
        self.happened = False


class FakeDevice:
    """Three streams of work that waits; implements :class:`sglang_plt.cache.layer_restores.SideStream`.

    Attributes:
        handed: names of the work in the order in which the host handed it over.
        done: the same in the order in which it was done.
    """

    def __init__(self) -> None:
        self.current = SCHEDULE
        self.handed: list[str] = []
        self.done: list[str] = []
        self._queues: dict[str, deque[Any]] = {name: deque() for name in (SCHEDULE, FORWARD, SIDE)}

    # -- what the host does ---------------------------------------------------------------------------------------

    def launch(self, work: Callable[[], None], name: str = "") -> None:
        """Hand ``work`` to the current stream."""
        if name:
            self.handed.append(name)
        self._queues[self.current].append((work, name))

    @contextmanager
    def on(self, stream: str, behind: str | None = None) -> Iterator[None]:
        """Make ``stream`` current, behind all that ``behind`` was given."""
        before = self.current
        if behind is not None:
            self._queues[stream].append(self._event_of(behind))
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    def _event_of(self, stream: str) -> Event:
        event = Event()
        self._queues[stream].append((lambda: setattr(event, "happened", True), ""))
        return event

    # -- the side stream ------------------------------------------------------------------------------------------

    @contextmanager
    def started(self) -> Iterator[None]:
        with self.on(SIDE, behind=self.current):
            # as the codec of a real pool has it
            self._queues[SIDE].append(self._event_of(FORWARD))
            yield

    def resumed(self) -> Any:
        return self.on(SIDE)

    def keep(self, slots: Any) -> None:
        pass

    def record(self) -> Event:
        return self._event_of(SIDE)

    def wait(self, event: Event) -> None:
        self._queues[self.current].append(event)

    # -- what the device does -------------------------------------------------------------------------------------

    def _blocked(self, stream: str) -> bool:
        head = self._queues[stream][0]
        return isinstance(head, Event) and not head.happened

    def run(self, prefer: str | int = 0, least: str | None = None) -> None:
        """Do all work: that of one stream wherever it can, or in an order drawn from a seed.

        Args:
            least: stop as soon as this stream has nothing left.
        """
        draw = random.Random(prefer) if isinstance(prefer, int) else None
        while any(self._queues.values()) and (least is None or self._queues[least]):
            able = [name for name, queue in self._queues.items() if queue and not self._blocked(name)]
            assert able, "the streams wait for each other"
            wanted = draw.choice(able) if draw is not None else prefer
            stream = wanted if wanted in able else able[0]
            head = self._queues[stream].popleft()
            if not isinstance(head, Event):
                work, name = head
                work()
                if name:
                    self.done.append(name)
