"""``value`` in the cache: what it learns from, what it takes of a node, and that nothing breaks under pressure."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis.stateful import invariant
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored

from sglang_plt.blocks import BLOCK_TOKENS
from sglang_plt.cache.policy import CachePolicy, TierRates
from sglang_plt.config import PLTConfig
from sglang_plt.value import Rates
from tests.cache.harness import Harness, Request
from tests.cache.test_parity import Parity, explore
from tests.simulate.traces import generated


def tokens(seed: int, count: int) -> array:
    return array("q", [seed * 10_000 + i for i in range(count)])


def make(kind: str = "plt-hot", slots: int = 2000, **kwargs) -> tuple[Harness, list[tuple[int, int, int, int]]]:
    """A cache with the policy ``value``, and the list of what it will observe: (end, matched, output, prompt)."""
    harness = Harness(kind, slots=slots, policy="value", **kwargs)
    learner = harness.cache.policy._learner
    seen: list[tuple[int, int, int, int]] = []
    observe = learner.observe

    def spy(end, matched_len, output_len, prompt_len):
        seen.append((end.stop, matched_len, output_len, prompt_len))
        observe(end, matched_len, output_len, prompt_len)

    learner.observe = spy
    return harness, seen


def serve(harness: Harness, ids: array, num_new: int = 0, **kwargs) -> tuple[int, int]:
    request = Request("r", array("q", ids), **kwargs)
    hits = harness.admit(request)
    for token in range(num_new):
        harness.decode(request, token)
    harness.release(request, checkpoint=True)
    harness.check()
    return hits


# -- any sequence of operations ---------------------------------------------------------------------------------------


class UnderPressure(Parity):
    """The harness's operations on our cache alone; rows, slots, blocks and the trie are checked after every step."""

    policy = "value"
    pressure = True
    kinds = ("plt",)
    part_tokens = BLOCK_TOKENS
    fixed_size = True

    def prepare(self) -> None:
        self.ours.cache.policy.part_tokens = self.part_tokens
        self.ours.codec.fixed_size = self.fixed_size
        self.ours.cache.cold.codec_changed()

    @invariant()
    def what_is_in_line_stays_there(self) -> None:
        if hasattr(self, "arms"):
            trie = self.ours.cache.trie
            for queue in (trie.hot_queue, trie.cold_queue):
                line = trie.in_line(queue, 50)
                assert line == trie.in_line(queue, 50)
                assert queue.peek() is (line[0] if line else None)


CASES = {
    "whole_nodes": {"slots": 72},
    "single_tokens": {"slots": 72, "part_tokens": 1},
    "small_store": {"slots": 72, "part_tokens": 4, "cold_bytes": 700},
    "tiny_store": {"slots": 72, "part_tokens": 2, "cold_bytes": 120, "background": True},
    "pages_of_4": {"slots": 160, "page_size": 4, "repeat": 2, "part_tokens": 8, "background": True},
    "parts_that_are_no_pages": {"slots": 160, "page_size": 4, "repeat": 2, "part_tokens": 6, "cold_bytes": 1200},
    "varying_sizes": {"slots": 72, "part_tokens": 4, "cold_bytes": 400, "fixed_size": False},
    "varying_sizes_in_background": {"slots": 72, "cold_bytes": 300, "fixed_size": False, "background": True},
    "pages_of_64": {"slots": 4096, "page_size": 64, "repeat": 32, "cold_bytes": 30_000},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stateful(case):
    explore(type("Case", (UnderPressure,), case))


# -- what it learns from ----------------------------------------------------------------------------------------------


def test_every_finished_request_is_observed_once():
    harness, seen = make()
    serve(harness, tokens(1, 40), num_new=3)
    serve(harness, tokens(1, 40), num_new=1)
    assert seen == [(43, 0, 3, 40), (41, 39, 1, 40)]


def test_chunks_of_a_prefill_are_no_requests():
    harness, seen = make()
    serve(harness, tokens(1, 20))
    request = Request("r", tokens(1, 50))
    harness.admit(request, chunk=10)
    harness.extend(request, 40)
    harness.extend(request, 50)
    assert len(seen) == 1
    harness.release(request, checkpoint=True)
    assert seen[1:] == [(50, 20, 0, 50)]


def test_a_retracted_request_counts_once_and_with_its_first_match():
    harness, seen = make()
    serve(harness, tokens(1, 20))
    request = Request("r", tokens(1, 50))
    harness.admit(request)
    harness.decode(request, 7)
    harness.release(request, checkpoint=False)
    request.retracted_stain = True
    assert len(seen) == 1
    request.lock, request.kv = None, type(request.kv)()
    assert harness.admit(request) == (50, 0)  # what it left at its first checkpoint
    harness.release(request, checkpoint=True)
    assert seen[1:] == [(51, 20, 1, 50)]


def test_an_abort_that_leaves_nothing_is_not_observed():
    harness, seen = make()
    request = Request("r", tokens(1, 20))
    harness.admit(request)
    harness.release(request, checkpoint=False)
    barred = Request("r", tokens(2, 20), skip_radix_cache_insert=True)
    harness.admit(barred)
    harness.release(barred, checkpoint=True)
    assert seen == []


def test_cold_rows_count_as_matched_even_where_they_are_recomputed():
    config = PLTConfig(restore_threshold=100, write_ahead=0)
    for threshold, hits in ((1, (0, 29)), (100, (0, 0))):
        harness, seen = make("plt", slots=100, config=replace(config, restore_threshold=threshold))
        serve(harness, tokens(1, 30))
        harness.evict(100)
        assert harness.cache.trie.cold_tokens == 30
        assert serve(harness, tokens(1, 30)) == hits
        assert seen[1] == (30, 29, 0, 30)


def test_pages_and_bigrams():
    harness, seen = make(page_size=16)
    serve(harness, tokens(1, 40))
    serve(harness, tokens(1, 40))
    serve(harness, tokens(2, 9))  # shorter than a page: nothing is inserted, only the clock moves
    assert seen == [(32, 0, 0, 32), (32, 32, 0, 32), (0, 0, 0, 0)]
    assert harness.cache.policy.order.now == 3
    harness, seen = make(is_eagle=True)
    serve(harness, tokens(1, 40))
    serve(harness, tokens(1, 40))
    assert seen == [(39, 0, 0, 39), (39, 38, 0, 39)]


def test_salted_requests_feed_no_statistics():
    harness, seen = make()
    serve(harness, tokens(1, 20), cache_salt="s")
    serve(harness, tokens(1, 20), cache_salt="s")
    learner = harness.cache.policy._learner
    assert len(seen) == 2
    assert not learner._common._counts
    assert list(learner._tables) == [None]


def test_a_flush_keeps_what_was_learned():
    harness, _ = make()
    serve(harness, tokens(1, 20))
    serve(harness, tokens(1, 20))
    counts = harness.cache.policy._learner._common._counts[()].reused[0]
    harness.flush()
    assert harness.cache.policy._learner._common._counts[()].reused[0] == counts > 0
    serve(harness, tokens(1, 20))


def test_other_policies_learn_nothing():
    harness = Harness("plt-hot", slots=100)
    serve(harness, tokens(1, 20))
    assert harness.cache.policy._learner is None
    assert harness.cache.trie.on_split is None


def test_options_of_sglangs_policies_are_heeded():
    protects = CachePolicy("slru", {"protected_threshold": 1}).order
    harness = Harness("plt-hot", slots=100)
    serve(harness, tokens(1, 20))
    (node,) = harness.cache.trie.nodes()
    assert (protects(node)[0], CachePolicy("slru").order(node)[0]) == (1, 0)


# -- what it takes ----------------------------------------------------------------------------------------------------


def hot(harness: Harness) -> list[tuple[int, int]]:
    return sorted((node.start, len(node)) for node in harness.cache.trie.nodes() if node.hot)


def test_a_long_node_loses_whole_blocks_from_its_end():
    harness, _ = make()
    serve(harness, tokens(1, 1000))
    harness.evict(1)
    assert hot(harness) == [(0, 512)]  # 256 of the 744 that are left over a block stay, the others are a last part
    harness.evict(200)
    assert hot(harness) == [(0, 256)]
    harness.evict(1)
    assert hot(harness) == []
    harness.check()


def test_sglang_policies_take_whole_nodes():
    harness = Harness("plt-hot", slots=2000)
    serve(harness, tokens(1, 1000))
    harness.evict(1)
    assert hot(harness) == []


def test_what_is_encoded_is_cut_between_blocks():
    """A prompt that ends inside a block, and its end taken off: no block has to be kept for both parts."""
    harness, _ = make("plt", slots=1120, config=PLTConfig(restore_threshold=1, write_ahead=2000))
    serve(harness, tokens(1, 1000))
    serve(harness, tokens(1, 100) + tokens(2, 10))  # splits the node, and its first block
    lower = next(node for node in harness.cache.trie.nodes() if node.start == 100 and len(node) == 900)
    assert [len(view) for view in lower.views] == [156, 256, 256, 232]
    assert harness.cache.policy.spares(lower, 1) == 412
    assert harness.cache.policy.spares(lower, 257) == 0  # 156 would stay, which is less than a block
    harness.evict(1)
    harness.check()
    assert serve(harness, tokens(1, 1000)) == (512, 487) or harness.cache.trie.cold_tokens


def test_events_of_parts_are_those_of_the_whole():
    harness, _ = make("plt", page_size=4, events=True, slots=2000)
    serve(harness, tokens(1, 1000))
    stored = [h for event in harness.cache.take_events() if isinstance(event, BlockStored) for h in event.block_hashes]
    assert len(stored) == 250
    removed: list = []
    while harness.cache.total_size():
        harness.evict(1)
        removed.append([h for e in harness.cache.take_events() if isinstance(e, BlockRemoved) for h in e.block_hashes])
    assert len(removed) > 1
    assert sorted(h for hashes in removed for h in hashes) == sorted(stored)
    assert set(removed[0]) == set(stored[-len(removed[0]) :])  # the end goes first
    serve(harness, tokens(1, 1000))
    again = {h for event in harness.cache.take_events() if isinstance(event, BlockStored) for h in event.block_hashes}
    assert again >= set(stored[:-1])


# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "times"), [("plt-hot", 1.1), ("plt", 1.02)])
def test_value_finds_more_than_lru(tmp_path, kind, times):
    """Agent sessions through the cache, a token for a unit of the trace: without a cold tier and with one as large."""
    found = {}
    for policy in ("lru", "value"):
        harness = Harness(kind, slots=200, policy=policy, cold_bytes=8 * 200, config=PLTConfig(restore_threshold=1))
        if harness.codec is not None:
            harness.codec.num_bytes = lambda num_rows, position: 8 * num_rows
        harness.cache.policy.part_tokens = 1
        found[policy] = 0
        for asked in generated(tmp_path).requests:
            request = Request("r", array("q", asked.units))
            found[policy] += sum(harness.admit(request))
            request.output_ids = array("q", bytes(8 * asked.output_length))
            request.refresh_fill_ids = lambda: None  # the trace holds no answers
            harness.release(request, checkpoint=True)
        harness.check()
    assert found["value"] > times * found["lru"] > 0


# -- rates ------------------------------------------------------------------------------------------------------------


def test_rates_of_the_tiers():
    rates = TierRates.of(1_700_000, 1000, 4_000, 46_080, 12_400)
    assert rates.hot == Rates(prefill_ns=4_000, token_bytes=46_080)
    assert rates.cold == Rates(1_700_000, 1000, 4_000, 12_400)
    assert rates.hot.saving(0) == rates.hot.saving(1 << 20)
    assert rates.cold.saving(0) < rates.cold.saving(1 << 20)
    alone = TierRates.of(1_700_000, 1000)
    assert alone.hot == alone.cold == Rates(1_700_000, 1000)
    assert TierRates.of(5, 0, 0, 8, 8).hot.prefill_ns == 1


def test_tiers_share_what_they_learn_and_differ_in_savings():
    harness, _ = make("plt", slots=22)
    policy = CachePolicy("value", None, TierRates.of(10_000, 5_000, 100, 64, 16))
    assert policy.order.now == policy.lower_order.now == 0
    serve(harness, tokens(1, 20))
    (node,) = harness.cache.trie.nodes()
    policy.order.observe(node, 0, 5)
    assert policy.lower_order.now == 1
    assert policy.lower_order.record(node) is policy.order.record(node)
    assert policy.lower_order.saving(node) == Rates(10_000, 5_000, 100, 16).saving(0, (8 * 20 + 16) // 20)
    harness.cache.cold.store.release(harness.cache.trie.clear_views(node))
    assert policy.lower_order.saving(node) == Rates(10_000, 5_000, 100, 16).saving(0)
    assert policy.order.saving(node) == Rates(100, token_bytes=64).saving(0)
