"""Blocks that are differences from others, from their first encoding to the last byte, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sglang_plt.blocks import BlockState
from sglang_plt.cache import block_room
from tests.cache.delta_codec import DeltaCodec, blocks_of, with_deltas
from tests.cache.test_parity import NAMESPACES, Parity, explore

BLOCK = 8
PARTS = [[7 * part + token * token % 11 for token in range(14)] for part in range(3)]
TEXTS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 14))


def written(head: int, first: int, second: int, cut: int) -> list[int]:
    """Few texts of parts that they have in common, shifted by what stands before them."""
    return [90 + head, *range(head)] + PARTS[first] + PARTS[second][:cut]


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    monkeypatch.setattr(block_room, "BLOCK_TOKENS", BLOCK)


# -- any sequence of operations ---------------------------------------------------------------------------------------


class Deltas(Parity):
    """Requests that resemble each other; failures and damage; after every step all counts are right, and all rows."""

    slots = 72
    pressure = True
    kinds = ("plt",)
    fixed_size = False
    lossless = False
    num_near = 0  # blocks stored as differences, over all runs

    def prepare(self) -> None:
        self.codec: DeltaCodec = with_deltas(self.ours, fixed_size=self.fixed_size)
        self.codec.lossless = self.lossless
        self.failed_restores = 0  # before the last flush

    def demand(self) -> int:
        return sum(len(r.full_untruncated_fill_ids) + 3 * self.page_size for r in self.ours.running)

    @rule(text=TEXTS, namespace=st.sampled_from(NAMESPACES), chunk=st.sampled_from([None, 5, 11]))
    def admit(self, text: tuple[int, int, int, int], namespace, chunk: int | None) -> None:
        self.request(written(*text), namespace, chunk)

    @rule(text=TEXTS, namespace=st.sampled_from(NAMESPACES))
    def serve(self, text: tuple[int, int, int, int], namespace) -> None:
        if self.request(written(*text), namespace):
            self.ours.release(self.ours.running[-1], checkpoint=True)

    serve_another, again = serve, None

    @rule(text=TEXTS, tokens=st.integers(8, 72))
    def serve_and_evict(self, text: tuple[int, int, int, int], tokens: int) -> None:
        self.serve(text, (None, None))
        self.ours.evict(tokens * self.repeat)

    @rule(drain=st.booleans())
    def write_ahead(self, drain: bool) -> None:
        self.ours.cache.cold.write_ahead()
        if drain:
            self.ours.cache.cold.writer.drain()

    @rule(what=st.sampled_from([(), (), (), ("encode",), ("decode",)]))
    def fail(self, what: tuple[str, ...]) -> None:
        self.ours.cache.cold.writer.drain()  # what fails must not depend on how far the writer is
        self.codec.failing = set(what)

    @rule(number=st.integers(0, 99))
    def damage(self, number: int) -> None:
        self.ours.cache.cold.writer.drain()
        ready = [block for block in blocks_of(self.ours) if block.state is BlockState.READY]
        if ready:
            ready[number % len(ready)].data.damaged = True

    @rule(share=st.integers(1, 4))
    def squeeze(self, share: int) -> None:
        """Part of the store is asked for; what is not enough drops nothing."""
        room, store = self.ours.cache.cold._room, self.ours.cache.cold.store
        before, wanted = store.used_bytes, min(store.budget_bytes, store.free_bytes + share * store.used_bytes // 4)
        if room._make_room(wanted, copies=True):
            assert store.free_bytes >= wanted
        else:
            assert store.used_bytes == before

    @precondition(lambda self: not self.ours.running and self.counter % 4 == 3)
    @rule()
    def flush(self) -> None:
        super().flush()
        self.failed_restores = self.ours.cache.stats.restore_failures

    @invariant()
    def nothing_is_broken(self) -> None:
        if not hasattr(self, "codec"):
            return
        cold, stats = self.ours.cache.cold, self.ours.cache.stats
        assert not self.codec.broken
        assert stats.restore_failures or not self.codec.num_refused
        assert stats.restore_failures <= self.codec.num_refused or stats.encode_failures
        unsound = [block for block in blocks_of(self.ours) if block.state is BlockState.FAILED and not block.references]
        if stats.restore_failures == self.failed_restores and not unsound:
            viewed = {view.block for node in self.ours.cache.trie.nodes() for view in node.views}
            assert set(cold.near._members) == {block.id for block in viewed if not block.references}

    def teardown(self) -> None:
        if not hasattr(self, "codec"):
            return
        ours, cold = self.ours, self.ours.cache.cold
        while ours.running:
            ours.release(ours.running[-1], checkpoint=False)
        ours.evict(self.slots)
        ours.cache.load_back.unpin()
        while (node := ours.cache.trie.cold_queue.peek()) is not None:
            cold._room.drop_cold(node)
            ours.check()
        store = cold.store
        assert (store.used_bytes, store.num_blocks, store.num_dependants, store.num_orphans) == (0, 0, 0, 0)
        assert (len(cold.near), cold.near.num_bytes) == (0, 0)
        ours.cache.release_host_resources()
        type(self).num_near += self.codec.num_near


CASES = {
    "roomy": {"lossless": True},
    "background": {"background": True, "cold_bytes": 700},
    "small_store": {"cold_bytes": 400},
    "tiny_store": {"cold_bytes": 120, "background": True},
    "value": {"cold_bytes": 400, "policy": "value", "lossless": True},
    "value_in_background": {"cold_bytes": 200, "policy": "value", "background": True},
    "exact_sizes": {"cold_bytes": 500, "fixed_size": True},
    "pages_of_4": {"slots": 160, "page_size": 4, "repeat": 2, "cold_bytes": 600},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stateful(case):
    machine = type("Case", (Deltas,), case | {"num_near": 0})
    explore(machine)
    assert machine.num_near > 0
