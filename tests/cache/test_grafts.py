"""Near-miss reuse where rows name their own prefix: what is exact stays exact, what is not stays apart."""

from array import array

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_plt.cache.grafts import Grafts
from sglang_plt.cache.near_request import STATE
from sglang_plt.config import PLTConfig
from sglang_plt.keys import is_near_miss, make_namespace
from sglang_plt.near_miss import Limits
from tests.cache.harness import Harness, Request, row_values

LIMITS = Limits(recompute=2, max_difference=0.2, max_difference_before=0.5, min_tokens=24, min_span=8, tail=2)
DONOR = array("q", range(100, 300))
NEAR = array("q", [*DONOR[:10], 7, 8, *DONOR[11:190], 9, 9, 9])


class CopyMover:
    """Rows as they are: the pool's rows name the prefix that they were computed for."""

    def __init__(self, harness: Harness):
        self.buffers = [harness.pool.get_key_buffer(0), harness.pool.get_value_buffer(0)]
        self.failing = False
        self.shifts: list[int] = []

    def can_shift(self, position: int, num_rows: int, shift: int) -> bool:
        return True

    def copy(self, source: torch.Tensor, target: torch.Tensor, position: int, shift: int) -> None:
        if self.failing:
            raise RuntimeError("copy was told to fail")
        self.shifts.append(shift)
        for buffer in self.buffers:
            buffer[target] = buffer[source]

    def deviation(self, one: torch.Tensor, other: torch.Tensor) -> float:
        return float((self.buffers[0][one] != self.buffers[0][other]).float().mean())


class NearHarness(Harness):
    """Admits as the scheduler does with the hooks of near-miss reuse."""

    def __init__(self, mode: str = "on", kind: str = "plt", override: bool = False, **kwargs):
        super().__init__(kind, **{"slots": 2048, **kwargs})
        self.mover = CopyMover(self)
        self.grafts = Grafts(self.cache, self.mover, mode, override, LIMITS)
        self.cache.set_grafts(self.grafts)

    def extend(self, request: Request, end: int) -> None:
        at, grafts = request.prefix_len, self.grafts
        while at < end:
            stop = grafts.next_stop(request, at) if request.extend_end else grafts.first_stop(request, at)
            super().extend(request, min(end, stop or end))
            grafts.graft(request)
            at = request.prefix_len

    def check_rows(self, request: Request) -> None:
        state = getattr(request, STATE, None)
        if state is None or not state.grafted:
            super().check_rows(request)

    def serve(self, tokens: array, **kwargs) -> Request:
        request = Request("r", array("q", tokens), **kwargs)
        self.admit(request)
        self.check()
        return request

    def finish(self, request: Request) -> None:
        self.release(request, checkpoint=True)
        self.check()

    def keys_of(self, request: Request) -> list[float]:
        where = self.rows.req_to_token[request.kv.req_pool_idx, : request.kv.kv_committed_len].long()
        return self.pool.get_key_buffer(0)[where].flatten().tolist()


def near_nodes(harness: Harness) -> list:
    return [node for node in harness.cache.trie.nodes() if is_near_miss(node.key.namespace) and node.hot]


def start(mode: str = "on", **kwargs) -> NearHarness:
    harness = NearHarness(mode, **kwargs)
    harness.finish(harness.serve(DONOR))
    return harness


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_span_is_taken_from_the_donor_and_the_rest_is_computed(page_size):
    harness = start(page_size=page_size)
    request = harness.serve(NEAR)
    (shift,) = set(harness.mover.shifts)
    assert shift == 1  # two tokens in place of one
    donor, own = (row_values(tokens, request.namespace).tolist() for tokens in (DONOR, NEAR))
    keys = harness.keys_of(request)
    reused = [at for at in range(len(NEAR)) if keys[at] != own[at]]
    assert reused == list(range(reused[0], reused[-1] + 1))
    assert all(keys[at] == donor[at - shift] for at in reused)
    assert reused[0] >= 12 + LIMITS.recompute
    assert reused[-1] < len(NEAR) - LIMITS.tail
    assert getattr(request, STATE).grafted == len(reused) == harness.grafts.stats.tokens
    harness.finish(request)


def test_what_is_reused_is_served_to_those_who_accept_it_only():
    harness = start(override=False)
    harness.finish(harness.serve(NEAR))
    assert near_nodes(harness)
    again = Request("again", array("q", [*NEAR, 50, 51]))
    hits = harness.admit(again)
    assert hits[0] == len(NEAR)
    assert getattr(again, STATE).grafted > 0
    harness.check()
    harness.finish(again)

    exact = Request("exact", array("q", [*NEAR, 50, 51]))
    exact.sampling_params = type("Params", (), {"custom_params": {STATE: "off"}})()
    hits = harness.admit(exact)  # check_rows sees every row
    assert hits[0] <= 12 + LIMITS.recompute
    harness.check()
    harness.finish(exact)
    assert not near_nodes(harness)  # the same tokens have been computed now


def test_a_donor_that_is_cold_is_decoded():
    harness = start()
    harness.evict(2048)
    request = harness.serve(NEAR)
    assert getattr(request, STATE).grafted
    harness.finish(request)


@pytest.mark.parametrize("what", ["mover", "decode", "gone"])
def test_a_donor_that_fails_is_computed(what):
    harness = start()
    if what == "mover":
        harness.mover.failing = True
    elif what == "decode":
        harness.evict(2048)
        harness.codec.failing = {"decode"}
    else:
        original = harness.grafts.graft

        def graft(request: Request) -> None:
            harness.evict(2048)
            while (victim := next((n for n in harness.cache.trie.nodes() if n.cold), None)) is not None:
                harness.cache.cold._drop_below(victim)
                harness.cache.cold._room.drop_cold(victim)
            original(request)

        harness.grafts.graft = graft
    request = harness.serve(NEAR)
    assert not getattr(request, STATE).grafted
    assert sum(harness.grafts.stats.refusals.values()) == 2  # of the donor, which had none, and of this one
    harness.finish(request)


def test_namespaces_are_walls():
    harness = start()
    for kwargs in ({"cache_salt": "a"}, {"extra_key": "lora"}):
        request = harness.serve(NEAR, **kwargs)
        assert not getattr(request, STATE).grafted
        harness.finish(request)
        assert harness.grafts.stats.refusals["no_donor"]


def test_within_a_salt_it_works():
    harness = NearHarness()
    harness.finish(harness.serve(DONOR, cache_salt="a"))
    request = harness.serve(NEAR, cache_salt="a")
    assert getattr(request, STATE).grafted
    harness.finish(request)
    (namespace,) = {node.key.namespace for node in near_nodes(harness)}
    assert namespace != make_namespace(None, "a")
    assert namespace == (None, next(iter({namespace[1]})))
    assert harness.admit(Request("other", array("q", NEAR), cache_salt="a", extra_key="x"))[0] == 0


@pytest.mark.parametrize("mode", ["off", "report"])
def test_less_than_on_computes_everything(mode):
    harness = start(mode)
    request = harness.serve(NEAR)
    assert harness.keys_of(request) == row_values(NEAR, request.namespace).tolist()
    assert harness.grafts.stats.tokens == 0
    assert harness.grafts.stats.reported == (mode == "report")
    harness.finish(request)


@pytest.mark.parametrize("asked", ["offf", "ON", "", 1, True, ["on"], {"on": 1}])
def test_an_unknown_mode_computes_everything_and_says_so(asked, caplog):
    harness = start(override=True)
    request = Request("typo", array("q", NEAR))
    request.sampling_params = type("Params", (), {"custom_params": {STATE: asked}})()
    for _ in range(2):
        harness.admit(request)
        harness.release(request, checkpoint=False)
    assert harness.grafts.stats.tokens == 0
    assert harness.grafts.stats.refusals["unknown_mode"] == 1
    assert "request typo" in caplog.text
    assert repr(asked) in caplog.text
    assert "off, report, on" in caplog.text


def test_abort_and_retraction_give_everything_back():
    harness = start()
    for chunk in (14, 30, None):
        request = Request("r", array("q", NEAR))
        harness.admit(request, chunk)
        harness.check()
        harness.release(request, checkpoint=False)
        harness.check()
        assert not near_nodes(harness)


def test_a_retracted_request_leaves_nothing_inexact_behind():
    harness = start()
    request = harness.serve(NEAR)
    harness.cache.checkpoint(request, up_to=request.kv.kv_committed_len)  # as a retraction does, unfinished
    harness.check()
    harness.release(request, checkpoint=False)
    harness.check()
    assert not near_nodes(harness)


def test_several_take_from_one_donor():
    harness = start()
    others = [harness.serve(array("q", [*DONOR[:10], 7 + n, *DONOR[11:190], n])) for n in range(3)]
    assert all(getattr(request, STATE).grafted for request in others)
    for request in others:
        harness.finish(request)


def test_a_full_pool_computes():
    harness = start(slots=400, kind="plt-hot")
    request = harness.serve(NEAR)
    harness.finish(request)


def test_flush_forgets_donors():
    harness = start()
    harness.flush()
    request = harness.serve(NEAR)
    assert not getattr(request, STATE).grafted
    harness.finish(request)


def test_reused_rows_are_no_donor():
    harness = start()
    harness.finish(harness.serve(NEAR))
    other = array("q", [*NEAR, 60, 61, 62])
    other[30] = 5
    request = harness.serve(other)
    assert len(harness.grafts._donors) == 1
    harness.finish(request)


def test_config_is_unused_without_grafts():
    assert Harness("plt", slots=64, config=PLTConfig(restore_threshold=1)).cache.grafts is None


class Traffic(RuleBasedStateMachine):
    """Prompts near one another, in every mode, with eviction in between: the exact part of the trie stays exact."""

    @initialize(page_size=st.sampled_from([1, 4]), cold=st.booleans(), slots=st.sampled_from([400, 2048]))
    def start(self, page_size: int, cold: bool, slots: int) -> None:
        kind = "plt" if cold else "plt-hot"
        self.harness = NearHarness("off", kind, override=True, page_size=page_size, slots=slots)

    @precondition(lambda self: len(self.harness.running) < 2)
    @rule(
        edits=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(["swap", "drop", "add"])), max_size=3),
        mode=st.sampled_from(["off", "report", "on", "on", "on"]),
        salt=st.sampled_from([None, None, "a"]),
        length=st.integers(100, 160),
    )
    def serve(self, edits: list[tuple[int, str]], mode: str, salt: str | None, length: int) -> None:
        tokens = list(range(500, 500 + length))
        for at, what in edits:
            at = min(at, len(tokens) - 1)
            tokens[at : at + (what != "add")] = [] if what == "drop" else [7 + at % 5]
        request = Request("r", array("q", tokens), cache_salt=salt)
        request.sampling_params = type("Params", (), {"custom_params": {STATE: mode}})()
        need = len(tokens) * 2 + 16
        if self.harness.allocator.available_size() + self.harness.cache.evictable_size() < need:
            return
        self.harness.admit(request)
        if mode != "on":
            Harness.check_rows(self.harness, request)

    @precondition(lambda self: self.harness.running)
    @rule(checkpoint=st.booleans())
    def end(self, checkpoint: bool) -> None:
        request = self.harness.running[0]
        if checkpoint:
            self.harness.decode(request, 3)
        self.harness.release(request, checkpoint=checkpoint)

    @rule(tokens=st.integers(1, 300))
    def evict(self, tokens: int) -> None:
        self.harness.evict(tokens)

    @precondition(lambda self: not self.harness.running)
    @rule()
    def flush(self) -> None:
        self.harness.flush()

    @invariant()
    def exact_is_exact(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.check()
        keys = self.harness.pool.get_key_buffer(0)
        for node in self.harness.cache.trie.nodes():
            if node.hot and not is_near_miss(node.key.namespace):
                path, walk = array("q"), node
                while walk.parent is not None:
                    path = walk.key.tokens + path
                    walk = walk.parent
                expected = row_values(path, node.key.namespace or (None, None))[node.start :]
                assert torch.equal(keys[node.slots].flatten(), expected), node


def test_any_traffic():
    run_state_machine_as_test(Traffic, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))
