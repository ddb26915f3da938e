"""The same random operations on our cache and on SGLang's three: equal matches, never fewer under pressure."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_plt.config import PLTConfig
from tests.cache.harness import MAX_REQUESTS, Harness, Request

THEIRS = ("radix", "unified-python", "unified-rust")
NAMESPACES = ((None, None), ("lora-a", None), (None, "salt"))

prompts = st.lists(st.integers(0, 2), min_size=2, max_size=24)


class Parity(RuleBasedStateMachine):
    """Requests come, are chunked, decode, finish, abort, are retracted; caches evict and flush."""

    slots = 4096
    page_size = 1
    cold_bytes = 1 << 30
    pressure = False
    policy = "lru"
    kinds: tuple[str, ...] = ("plt", *THEIRS)
    background = False
    repeat = 1  # every drawn token stands for so many

    @initialize()
    def start(self) -> None:
        config = PLTConfig(restore_threshold=1, write_ahead=24)
        self.arms = {
            kind: Harness(
                kind,
                slots=self.slots,
                page_size=self.page_size,
                policy=self.policy,
                cold_bytes=self.cold_bytes,
                config=config,
                background=self.background,
            )
            for kind in self.kinds
        }
        self.counter = 0
        self.seen: list = []
        self.prepare()

    def prepare(self) -> None:
        """What a subclass does to the arms before the first operation."""

    @property
    def ours(self) -> Harness:
        return self.arms["plt"]

    def demand(self) -> int:
        page = self.page_size
        return sum(-(-r.kv.kv_allocated_len // page) * page + 2 * page for r in self.ours.running)

    def fits(self, tokens: int) -> bool:
        return self.demand() + tokens + 3 * self.page_size <= self.slots and len(self.ours.running) < MAX_REQUESTS - 1

    def compare(self, hits: dict[str, tuple[int, int]]) -> None:
        total = {kind: device + host for kind, (device, host) in hits.items()}
        for kind in THEIRS:
            if kind not in hits:
                continue
            if self.pressure:
                assert total["plt"] >= total[kind], (kind, hits)
            else:
                assert hits["plt"] == hits[kind], (kind, hits)

    def request(self, prompt: list[int], namespace, chunk: int | None = None) -> bool:
        tokens = array("q", (token for token in prompt for _ in range(self.repeat)))
        if not self.fits(len(tokens)):
            return False
        self.counter += 1
        self.seen.append((prompt, namespace))
        hits = {}
        for kind, arm in self.arms.items():
            hits[kind] = arm.admit(Request(f"r{self.counter}", array("q", tokens), *namespace), chunk)
        self.compare(hits)
        return True

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES), chunk=st.none() | st.integers(1, 12))
    def admit(self, prompt: list[int], namespace, chunk: int | None) -> None:
        self.request(prompt, namespace, chunk)

    @rule(prompt=prompts, namespace=st.sampled_from(NAMESPACES))
    def serve(self, prompt: list[int], namespace) -> None:
        if self.request(prompt, namespace):
            for arm in self.arms.values():
                arm.release(arm.running[-1], checkpoint=True)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), suffix=st.lists(st.integers(0, 2), max_size=12), wait=st.booleans())
    def again(self, data, suffix: list[int], wait: bool) -> None:
        prompt, namespace = data.draw(st.sampled_from(self.seen))
        cut = data.draw(st.integers(1, len(prompt)))
        longer = (prompt[:cut] + suffix)[:32]
        if len(longer) > 1 and self.request(longer, namespace) and not wait:
            for arm in self.arms.values():
                arm.release(arm.running[-1], checkpoint=True)

    @precondition(lambda self: self.ours.running)
    @rule(data=st.data())
    def go_on(self, data) -> None:
        index = data.draw(st.integers(0, len(self.ours.running) - 1))
        step = data.draw(st.integers(1, 12))
        for arm in self.arms.values():
            request = arm.running[index]
            length = len(request.full_untruncated_fill_ids)
            if request.extend_end < length and not request.output_ids:
                arm.extend(request, min(length, request.extend_end + step))
            elif self.demand() + 2 * self.page_size <= self.slots and length < 64 * self.repeat:
                arm.decode(request, step % 3)

    @precondition(lambda self: self.ours.running)
    @rule(data=st.data(), checkpoint=st.booleans())
    def release(self, data, checkpoint: bool) -> None:
        index = data.draw(st.integers(0, len(self.ours.running) - 1))
        for arm in self.arms.values():
            arm.release(arm.running[index], checkpoint=checkpoint)

    @precondition(lambda self: self.pressure)
    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens: int) -> None:
        tokens *= self.repeat
        for arm in self.arms.values():
            arm.evict(tokens)

    @precondition(lambda self: not self.ours.running and self.counter % 4 == 3)
    @rule()
    def flush(self) -> None:
        for arm in self.arms.values():
            arm.flush()

    @invariant()
    def sound(self) -> None:
        for arm in getattr(self, "arms", {}).values():
            arm.check()


CASES = {
    "no_pressure": {},
    "no_pressure_pages_of_16": {"page_size": 16, "repeat": 6, "kinds": ("plt", "radix")},
    "pressure": {"slots": 72, "pressure": True},
    "pressure_pages_of_4": {"slots": 160, "page_size": 4, "repeat": 2, "pressure": True, "kinds": ("plt", "radix")},
    "pressure_pages_of_64": {"slots": 1536, "page_size": 64, "repeat": 16, "pressure": True, "kinds": ("plt", "radix")},
    "pressure_background": {"slots": 72, "pressure": True, "background": True, "kinds": ("plt", "radix")},
    # a store that overflows: fewer hits are allowed, lost slots or wrong rows are not
    "small_store": {"slots": 72, "cold_bytes": 700, "pressure": True, "kinds": ("plt",)},
    "tiny_store": {"slots": 72, "cold_bytes": 120, "pressure": True, "background": True, "kinds": ("plt",)},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stateful(case):
    explore(type("Case", (Parity,), case))


def explore(machine: type[Parity]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
