"""Damage, exceptions and a full store: a counted miss, no slot lost, no wrong row, and the cache goes on."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams

from sglang_plt.blocks import BlockState
from sglang_plt.cache.views import joined
from sglang_plt.codec import decode_block, encode_block, make_codec
from sglang_plt.codec.base import exact_rows
from sglang_plt.codec.block import HEADER_BYTES, block_limit
from sglang_plt.codec.rows import PoolRows, RowLayout
from sglang_plt.config import PLTConfig
from tests.cache.harness import Harness, Request

LONG = array("q", [(7 * i) % 97 for i in range(40)])
OTHER = array("q", [(5 * i) % 89 + 1 for i in range(60)])


class RealCodec:
    """The product's ``raw`` blocks over the harness's pool."""

    lossless = True
    fixed_size = True
    takes_references = False
    takes_tokens = False

    def __init__(self, harness: Harness):
        keys, values = harness.pool.get_key_buffer(0), harness.pool.get_value_buffer(0)
        layout = RowLayout(1, 1, 1, 1, torch.float32)
        self.codec = make_codec("raw", PoolRows(layout, (keys,), (values,)), None)

    def num_bytes(self, num_rows: int, position: int) -> int:
        return block_limit(self.codec, num_rows, exact_rows(position, num_rows))

    def advance(self, agree_min):
        return False

    def encode(self, slots, position, teaches=False):
        return encode_block(self.codec, 1, slots, position)

    def decode(self, data, start, stop, slots, position):
        decode_block(self.codec, 1, data, start, stop, slots, position)


def serve(harness: Harness, tokens: array, **kwargs) -> tuple[int, int]:
    """One whole request; returns its (device, host) hit."""
    request = Request("r", array("q", tokens), **kwargs)
    hits = harness.admit(request)
    harness.release(request, checkpoint=True)
    harness.check()
    return hits


@pytest.fixture
def harness():
    harness = Harness("plt", slots=72)
    yield harness
    harness.check()
    harness.cache.release_host_resources()


def demoted(harness: Harness) -> None:
    """LONG is cold."""
    serve(harness, LONG)
    harness.evict(72)
    harness.check()
    assert harness.cache.trie.cold_tokens == 40


def test_restores_what_was_evicted(harness):
    demoted(harness)
    assert serve(harness, LONG) == (0, 39)
    assert harness.cache.stats.restored_tokens == 39


def test_a_failing_decode_is_a_counted_miss(harness):
    demoted(harness)
    harness.codec.failing = {"decode"}
    assert serve(harness, LONG) == (0, 39)  # promised, then recomputed
    assert harness.cache.stats.restore_failures == 1
    harness.codec.failing = set()
    assert serve(harness, LONG) == (39, 0)


def test_a_failing_encode_is_a_counted_miss(harness):
    harness.codec.failing = {"encode"}
    demoted(harness)
    assert harness.cache.stats.encode_failures > 0
    harness.codec.failing = set()
    serve(harness, LONG)
    assert harness.cache.stats.restore_failures == 1
    assert serve(harness, LONG) == (39, 0)


def test_another_rank_that_fails_makes_every_rank_recompute():
    votes = []
    harness = Harness("plt", slots=72)
    harness.cache.cold._agree_min = lambda value: votes.append(value) or min(value, 0)
    demoted(harness)
    assert serve(harness, LONG) == (0, 39)
    assert votes == [1]  # this rank decoded the one node
    assert harness.cache.stats.restore_failures == 1
    assert harness.cache.stats.restored_tokens == 0


@pytest.mark.parametrize("byte", [*range(0, HEADER_BYTES, 3), HEADER_BYTES, -1])
def test_a_flipped_bit_is_a_counted_miss(byte):
    harness = Harness("plt", slots=72)
    harness.cache.cold.codec = RealCodec(harness)
    demoted(harness)
    blocks = {view.block.id: view.block for node in harness.cache.trie.nodes() for view in node.views}
    for block in blocks.values():
        data = np.array(block.data)
        data[byte] ^= 1
        block.data = data
    assert serve(harness, LONG) == (0, 39)
    assert harness.cache.stats.restore_failures == 1
    assert harness.cache.stats.restored_tokens == 0


def test_damage_takes_what_hangs_below_and_leaves_the_rest(harness):
    serve(harness, LONG[:20])
    serve(harness, LONG)
    serve(harness, OTHER[:20])
    harness.evict(72)
    second = next(node for node in harness.cache.trie.nodes() if node.start == 20)
    second.views[0].block.data = None
    assert serve(harness, LONG) == (0, 39)
    assert harness.cache.stats.restore_failures == 1
    assert serve(harness, OTHER[:20]) == (0, 19)


def test_a_store_that_cannot_hold_a_node_drops_it():
    harness = Harness("plt", slots=72, cold_bytes=40)
    serve(harness, LONG)
    harness.evict(72)
    harness.check()
    assert harness.cache.trie.cold_tokens == 0
    assert harness.cache.trie.replay_tokens == 40
    assert harness.cache.stats.store_full == 1
    assert serve(harness, LONG) == (0, 0)


def test_a_full_store_drops_the_oldest_leaf_first():
    harness = Harness("plt", slots=72, cold_bytes=8 * 60 + 16, config=PLTConfig(restore_threshold=1, write_ahead=0))
    serve(harness, LONG)
    serve(harness, OTHER[:20])
    harness.evict(72)
    harness.check()
    assert serve(harness, LONG) == (0, 0)
    assert serve(harness, OTHER[:20]) == (0, 19)


def test_what_cannot_be_stored_costs_no_cold_rows():
    """Restored rows hold nearly the whole store and cannot be encoded again: dropping the rest would win nothing."""
    config = PLTConfig(restore_threshold=1, write_ahead=0)
    harness = Harness("plt", slots=80, cold_bytes=8 * 60 + 32, config=config)
    harness.codec.lossless = False
    serve(harness, OTHER[:10])
    serve(harness, LONG)
    harness.evict(80)
    holder = Request("holder", array("q", LONG))
    assert harness.admit(holder) == (0, 39)
    harness.release(holder, checkpoint=True)
    serve(harness, array("q", range(1000, 1030)))
    lock = harness.cache.lock(holder.last_node)
    harness.evict(30)  # does not fit beside the 40 that are held, with the 10 or without
    harness.cache.unlock(lock)
    harness.check()
    assert harness.cache.stats.store_full == 1
    assert harness.cache.stats.dropped_tokens == {"hot": 30, "cold": 0, "replay": 0}
    assert serve(harness, OTHER[:10]) == (0, 9)


def test_copies_and_cold_rows_go_together_where_one_of_them_is_not_enough():
    harness = Harness("plt", slots=80, cold_bytes=8 * 30 + 64, config=PLTConfig(restore_threshold=1, write_ahead=0))
    serve(harness, OTHER[:10])
    harness.evict(80)
    serve(harness, LONG[:15])
    (copy,) = [node for node in harness.cache.trie.nodes() if node.hot]
    assert harness.cache.cold._room.reserve(copy, last_resort=False)
    lock = harness.cache.lock(copy)
    serve(harness, array("q", range(1000, 1028)))
    harness.evict(28)
    harness.cache.unlock(lock)
    harness.check()
    assert not copy.views
    assert harness.cache.stats.dropped_tokens == {"hot": 0, "cold": 10, "replay": 0}
    assert harness.cache.trie.cold_tokens == 28


def test_copies_that_are_last_in_line_go_first():
    """Last in line by the policy: with ``fifo`` the newest, however recently the oldest was used."""
    config = PLTConfig(restore_threshold=1, write_ahead=0)
    harness = Harness("plt", slots=80, policy="fifo", cold_bytes=8 * 40 + 64, config=config)
    cold = harness.cache.cold
    for seed in (1, 2):
        serve(harness, array("q", range(seed * 1000, seed * 1000 + 15)))
    old, new = sorted((node for node in harness.cache.trie.nodes()), key=lambda node: node.created)
    assert cold._room.reserve(old, last_resort=False)
    assert cold._room.reserve(new, last_resort=False)
    harness.cache.trie.match(old.key)
    assert cold._room._make_room(8 * 20, copies=True)
    assert old.views
    assert not new.views


def test_rows_are_encoded_once(harness):
    demoted(harness)
    for _ in range(5):
        assert serve(harness, LONG) == (0, 39)
        encoded = harness.cache.stats.encoded_bytes
        harness.evict(72)
        harness.check()
    # the last token of the prompt is computed anew each time, everything else is encoded once
    assert harness.cache.stats.encoded_bytes - encoded <= harness.codec.num_bytes(1, 39)


def test_decoded_rows_are_not_encoded_again(harness):
    harness.codec.lossless = False
    demoted(harness)
    serve(harness, LONG)
    node = next(node for node in harness.cache.trie.nodes() if node.start == 0)
    assert node.lossy
    harness.cache.cold.store.release(harness.cache.trie.clear_views(node))
    harness.evict(72)
    harness.check()
    assert serve(harness, LONG) == (0, 0)


def test_short_cold_runs_are_recomputed():
    harness = Harness("plt", slots=72, config=PLTConfig(restore_threshold=41))
    demoted(harness)
    assert serve(harness, LONG) == (0, 0)
    assert serve(harness, LONG) == (39, 0)


def test_pinned_rows_survive_pressure_between_match_and_restore(harness):
    demoted(harness)
    request = Request("r", array("q", LONG))
    match = harness.cache.match_prefix(MatchPrefixParams(key=harness.key(request, 39), req=request))
    assert match.host_hit_length == 39
    assert harness.cache.cold._room._make_room(harness.cache.cold.store.budget_bytes, copies=False) is False
    request.last_node = match.last_device_node
    loaded, node = harness.cache.init_load_back(InitLoadBackParams(match.best_match_node, 39, req=request))
    assert (loaded, node.stop) == (39, 39)


def test_a_promise_that_no_longer_holds_is_recomputed(harness):
    demoted(harness)
    request = Request("r", array("q", LONG))
    match = harness.cache.match_prefix(MatchPrefixParams(key=harness.key(request, 39), req=request))
    request.last_node = match.last_device_node
    serve(harness, LONG)  # another request brings the rows back meanwhile
    result = harness.cache.init_load_back(InitLoadBackParams(match.best_match_node, 39, req=request))
    assert result == (0, match.last_device_node)


def test_a_restore_without_slots_is_recomputed(harness):
    demoted(harness)
    request = Request("holder", array("q", OTHER))
    harness.admit(request)
    waiting = Request("r", array("q", LONG))
    match = harness.cache.match_prefix(MatchPrefixParams(key=harness.key(waiting, 39), req=waiting))
    waiting.last_node = match.last_device_node
    assert harness.cache.init_load_back(InitLoadBackParams(match.best_match_node, 39, req=waiting))[0] == 0
    harness.check()
    harness.release(request, checkpoint=False)


def test_flush_with_blocks_in_the_queue():
    harness = Harness("plt", slots=72, background=True)
    for start in range(8):
        serve(harness, LONG[start:])
    harness.flush()
    harness.check()
    assert harness.cache.cold.store.used_bytes == 0
    assert serve(harness, LONG) == (0, 0)
    harness.cache.release_host_resources()


def test_a_pinned_node_outlives_the_loss_of_its_views():
    """A match pins a cold path; before its restore the hot node above it is evicted and cannot be stored."""
    config = PLTConfig(restore_threshold=1, write_ahead=0, replay_tokens=0)
    harness = Harness("plt", slots=72, cold_bytes=100, config=config)
    for length in (10, 20, 26):
        serve(harness, LONG[:length])
    harness.evict(6)
    harness.check()
    assert harness.cache.trie.cold_tokens == 6
    request = Request("r", array("q", LONG[:26]))
    match = harness.cache.match_prefix(MatchPrefixParams(key=harness.key(request, 25), req=request))
    assert match.host_hit_length > 0
    harness.evict(1)
    harness.check()
    serve(harness, OTHER[:20])
    assert all(node.pin_count == 0 for node in harness.cache.trie.nodes())
    harness.check()


def test_nothing_is_written_ahead_while_slots_are_plenty():
    harness = Harness("plt", slots=72, config=PLTConfig(restore_threshold=1, write_ahead=72))
    serve(harness, LONG)
    assert harness.cache.cold.store.used_bytes == 0
    serve(harness, OTHER[:24])  # less than an eighth is free now
    assert harness.cache.cold.store.used_bytes > 0


def test_a_prompt_is_written_while_its_request_runs():
    harness = Harness("plt", slots=72, config=PLTConfig(restore_threshold=1, write_ahead=72))
    harness.admit(Request("a", LONG + OTHER[:24]))  # less than an eighth is free, all of it is locked
    (node,) = harness.cache.trie.nodes()
    assert node.lock_count
    assert sum(len(view) for view in node.views) == len(node)
    harness.decode(harness.running[0], 7)
    harness.check()
    harness.release(harness.running[0], checkpoint=True)
    harness.check()


def test_a_block_that_splits_have_cut_is_decoded_once():
    harness = Harness("plt", slots=45, config=PLTConfig(restore_threshold=1, write_ahead=72))
    serve(harness, LONG)
    serve(harness, LONG[:20] + OTHER[:4])
    harness.evict(45)
    request = Request("again", LONG)
    harness.admit(request)
    assert harness.cache.stats.restored_tokens >= len(LONG) - 2
    path = [node for node in harness.cache.trie.path(request.last_node) if node.views]
    assert len(path) > 1
    ((first, view),) = joined(path)
    assert (first, view.start, view.stop) == (0, 0, len(LONG))


def test_giving_up_half_a_block_finishes_it_first():
    """A queued block that two nodes share is encoded before one of them can lose its slots."""
    harness = Harness("plt", slots=45, config=PLTConfig(restore_threshold=1, write_ahead=72))
    serve(harness, LONG)
    (block,) = {view.block for node in harness.cache.trie.nodes() for view in node.views}
    assert block.state is BlockState.QUEUED
    serve(harness, LONG[:20] + OTHER[:4])  # splits the node, and with it the block
    assert block.refs > 1
    assert harness.cache.cold._room._make_room(harness.cache.cold.store.budget_bytes, copies=True)
    assert harness.cache.cold.store.used_bytes == 0
    assert block.state is BlockState.READY
    harness.check()
