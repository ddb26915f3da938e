"""Differences from blocks that are dropped, damaged, never encoded, or larger than they seemed: one case each."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sglang_plt.blocks import BlockState
from sglang_plt.cache import block_room
from sglang_plt.config import PLTConfig
from tests.cache.delta_codec import blocks_of, with_deltas
from tests.cache.harness import Harness, Request

BODY = [100 + token for token in range(15)]
CENTRE, NEAR, FAR = (array("q", tokens) for tokens in ([1, *BODY], [2, *BODY], range(500, 516)))
LONELY = PLTConfig(restore_threshold=1, write_ahead=0)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(block_room, "BLOCK_TOKENS", 16)


def make(**kwargs) -> Harness:
    harness = Harness("plt", slots=72, **{"config": LONELY, **kwargs})
    with_deltas(harness).lossless = False
    return harness


def serve(harness: Harness, tokens: array, **kwargs) -> tuple[int, int]:
    request = Request("r", array("q", tokens), **kwargs)
    hits = harness.admit(request)
    harness.release(request, checkpoint=True)
    sound(harness)
    return hits


def sound(harness: Harness) -> None:
    harness.check()
    assert not harness.codec.broken


def store(harness: Harness, *texts: array, **kwargs) -> list:
    """Serve and demote one text after another; returns the nodes that they begin with."""
    found = []
    for tokens in texts:
        serve(harness, tokens, **kwargs)
        found += [node for node in harness.cache.trie.nodes() if node.hot and node.start == 0]
        harness.evict(72)
        sound(harness)
    return found


def drop(harness: Harness, node) -> None:
    harness.cache.cold._room.drop_cold(node)
    sound(harness)


def empty(harness: Harness) -> bool:
    store = harness.cache.cold.store
    return (store.used_bytes, store.num_blocks, store.num_dependants, store.num_orphans) == (0, 0, 0, 0)


def test_what_resembles_is_a_difference_and_comes_back():
    harness = make()
    store(harness, CENTRE, FAR, NEAR)
    centre, far, near = blocks_of(harness)
    assert [reference.block for reference in near.references] == [centre]
    assert near.references[0].stretches == ((1, 1, 15),)
    assert not far.references
    stats, cold = harness.cache.stats, harness.cache.cold
    assert (stats.near_candidates, stats.near_accepted, harness.codec.num_near) == (1, 1, 1)
    assert (len(cold.near), cold.store.num_dependants, cold.store.num_orphans) == (2, 1, 0)
    assert serve(harness, NEAR) == (0, 15)
    assert serve(harness, CENTRE) == (0, 15)


@pytest.mark.parametrize("first", [0, 1])
def test_either_may_go_first(first):
    harness = make()
    nodes = store(harness, CENTRE, NEAR)
    drop(harness, nodes[first])
    cold = harness.cache.cold
    assert (cold.store.num_blocks, cold.store.num_orphans, len(cold.near)) == ((2, 1, 0), (1, 0, 1))[first]
    assert serve(harness, (NEAR, CENTRE)[first]) == (0, 15)
    harness.evict(72)
    for node in [node for node in harness.cache.trie.nodes() if node.cold][::-1]:
        drop(harness, node)
    assert empty(harness)
    assert len(cold.near) == 0


def test_an_orphan_is_no_reference_and_a_difference_neither():
    harness = make()
    nodes = store(harness, CENTRE, NEAR)
    drop(harness, nodes[0])
    store(harness, array("q", [3, *BODY]))
    assert not blocks_of(harness)[-1].references


def test_a_difference_from_what_was_never_encoded_stands_for_itself():
    harness = make()
    harness.codec.failing = {"encode"}
    serve(harness, CENTRE)
    (centre,) = [node for node in harness.cache.trie.nodes()]
    assert harness.cache.cold._room.reserve(centre, last_resort=False)
    serve(harness, NEAR)
    (near,) = [node for node in harness.cache.trie.nodes() if node is not centre]
    assert harness.cache.cold._room.reserve(near, last_resort=False)
    harness.cache.cold.writer.finish(centre.views[0].block)
    harness.codec.failing = set()
    harness.evict(72)
    sound(harness)
    assert [block.state for block in blocks_of(harness)] == [BlockState.FAILED, BlockState.READY]
    assert blocks_of(harness)[1].references
    assert serve(harness, NEAR) == (0, 15)
    assert harness.cache.stats.restore_failures == 0


def test_what_no_rank_could_encode_is_offered_no_more():
    harness = make()
    harness.codec.failing = {"encode"}
    store(harness, CENTRE)
    harness.codec.failing = set()
    store(harness, NEAR)
    failed, near = blocks_of(harness)
    assert (failed.num_bytes, near.references) == (0, ())


def test_damage_is_a_counted_miss_of_all_that_needs_it_and_of_nothing_else():
    harness = make()
    store(harness, CENTRE, NEAR, FAR)
    blocks_of(harness)[0].data.damaged = True
    assert serve(harness, NEAR) == (0, 15)  # promised, then computed
    assert harness.cache.stats.restore_failures == 1
    assert serve(harness, FAR) == (0, 15)
    harness.evict(72)
    assert not blocks_of(harness)[-1].references, "what could not be read is offered no more"
    assert serve(harness, NEAR) == (0, 15)
    assert serve(harness, CENTRE) == (0, 15)
    assert harness.cache.stats.restore_failures == 2
    assert harness.cache.stats.restored_tokens == 30


def test_orphans_are_charged_what_they_take():
    harness = make(config=replace(LONELY, write_ahead=72))
    serve(harness, CENTRE)
    serve(harness, NEAR)
    centre = next(node for node in harness.cache.trie.nodes() if node.key.tokens[0] == 1)
    lock = harness.cache.lock(centre)
    harness.evict(72)  # the difference, and with it what it refers to
    harness.cache.unlock(lock)
    sound(harness)
    assert [block.num_bytes for block in blocks_of(harness)] == [len(block.data) for block in blocks_of(harness)]


def test_a_reference_that_grows_does_not_overflow_the_store():
    """A copy of hot rows turns out too large for the store once another block is a difference from it."""
    harness = make(cold_bytes=110)
    cold = harness.cache.cold
    serve(harness, CENTRE)
    (centre,) = harness.cache.trie.nodes()
    assert cold._room.reserve(centre, last_resort=False)
    harness.codec.size = 120
    cold.writer.finish(centre.views[0].block)
    assert centre.views[0].block.num_bytes < 110
    harness.codec.size = 10
    lock = harness.cache.lock(centre)
    store(harness, NEAR)
    harness.cache.unlock(lock)
    assert harness.codec.num_near == 1
    assert (cold.stats.store_full, empty(harness)) == (1, True)
    harness.evict(72)
    sound(harness)
    assert serve(harness, CENTRE) == (0, 15)
    assert serve(harness, NEAR) == (0, 0)


def test_rows_that_fit_in_place_of_their_reference_only_take_that_place():
    harness = make(cold_bytes=100)
    harness.codec.size = 80
    store(harness, CENTRE)
    harness.codec.size = 90
    harness.cache.cold._room.sizes._near_bytes = 2  # beside 80 bytes there is no room for a difference
    store(harness, NEAR)
    assert harness.codec.num_near == 0
    assert [block.num_bytes for block in blocks_of(harness)] == [90]
    assert serve(harness, NEAR) == (0, 15)


def test_namespaces_are_walls():
    harness = make()
    store(harness, CENTRE, cache_salt="a")
    store(harness, CENTRE, NEAR, cache_salt="b")
    assert harness.cache.stats.near_candidates == 1
    assert [len(block.references) for block in blocks_of(harness)] == [0, 0, 1]
    serve(harness, NEAR, cache_salt="a")
    first, second, near, other = blocks_of(harness) if harness.evict(72) is None else ()
    assert (near.references[0].block, other.references[0].block) == (second, first)


def test_equal_prompts_under_two_salts_are_no_candidates():
    harness = make()
    store(harness, CENTRE, cache_salt="a")
    store(harness, CENTRE, NEAR[:1] + FAR, cache_salt="b")
    store(harness, CENTRE, extra_key="c")
    assert (harness.cache.stats.near_candidates, harness.codec.num_near) == (0, 0)


def test_switched_off():
    harness = make(config=replace(LONELY, delta=False))
    store(harness, CENTRE, NEAR)
    assert (harness.codec.num_near, harness.cache.stats.near_candidates, len(harness.cache.cold.near)) == (0, 0, 0)
