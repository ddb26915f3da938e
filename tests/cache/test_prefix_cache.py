"""What the stateful tests do not reach: eviction policies, priorities, EAGLE keys, KV events, inserts by chunks."""

from __future__ import annotations

from array import array

import pytest
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.cache.harness import Harness, Request

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


def tokens(seed: int, count: int = 10) -> array:
    return array("q", [seed * 1000 + i for i in range(count)])


def serve(harness: Harness, ids: array, **kwargs) -> tuple[int, int]:
    request = Request("r", array("q", ids), **kwargs)
    hits = harness.admit(request)
    harness.release(request, checkpoint=True)
    harness.check()
    return hits


@pytest.mark.parametrize("policy", POLICIES)
def test_evicts_in_the_order_of_sglang(policy):
    """The same history on our trie and SGLang's radix cache; then slots are taken one node at a time."""
    arms = [Harness(kind, slots=400, policy=policy) for kind in ("plt-hot", "radix")]
    for arm in arms:
        for seed, priority in ((1, 0), (2, 3), (3, 1), (4, 2), (5, 0)):
            serve(arm, tokens(seed), priority=priority)
        for seed in (2, 4, 2, 3):
            serve(arm, tokens(seed) + tokens(seed + 10, 3))
    free: list[list[int]] = [[], []]
    for _ in range(9):
        for arm, order in zip(arms, free, strict=True):
            arm.evict(1)
            arm.check()
            order.append(arm.allocator.available_size())
    assert free[0] == free[1]


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="--plt-policy='tlru' is unknown; choose one of value, lru"):
        Harness("plt-hot", slots=10, policy="tlru")


def test_prompt_outlives_answer_under_priority():
    harness = Harness("plt-hot", slots=100, policy="priority")
    request = Request("r", tokens(1))
    harness.admit(request)
    for token in range(5):
        harness.decode(request, token)
    harness.release(request, checkpoint=True)
    harness.evict(1)
    assert harness.cache.total_size() == 10
    harness.check()


def test_eagle_keys_are_bigrams():
    """N tokens make N - 1 units; neighbours share the boundary token."""
    harness = Harness("plt-hot", slots=64, is_eagle=True)
    cache = harness.cache
    slots = harness.allocator.alloc(6)
    result = cache.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3, 4, 5, 6])), value=slots))
    assert result.prefix_len == 0
    assert cache.total_size() == 5

    def matched(ids: list[int]) -> int:
        return cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids)))).device_prefix_len

    assert matched([1, 2, 3, 4, 5, 6]) == 5
    assert matched([1, 2, 3, 9]) == 2
    assert matched([1, 2]) == 1
    assert matched([1]) == 0
    assert matched([2, 3]) == 0
    assert torch.equal(
        cache.path_device_indices(
            cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", [1, 2, 3, 9])))).last_device_node
        ),
        slots[:2],
    )
    cache.trie.check()


def test_eagle_parity_with_sglang():
    arms = [Harness(kind, slots=200, is_eagle=True) for kind in ("plt-hot", "radix")]
    sequences = [[1, 1, 2, 1, 1, 2, 3], [1, 1, 2, 1], [1, 1, 1, 2], [2, 1, 1], [1, 1, 2, 1, 1, 2, 3, 4, 4]]
    for ids in sequences:
        results = []
        for arm in arms:
            key = RadixKey(array("q", ids))
            matched = arm.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids)))).device_prefix_len
            inserted = arm.cache.insert(InsertParams(key=key, value=arm.allocator.alloc(len(ids)))).prefix_len
            results.append((matched, inserted, arm.cache.total_size()))
        assert results[0] == results[1], ids


def test_a_key_shorter_than_a_page_matches_nothing():
    harness = Harness("plt", slots=128, page_size=16)
    assert serve(harness, tokens(1, 40)) == (0, 0)
    assert serve(harness, tokens(1, 8)) == (0, 0)
    assert serve(harness, tokens(1, 40)) == (32, 0)


def test_namespaces_are_walls():
    harness = Harness("plt", slots=200)
    serve(harness, tokens(1), extra_key="a")
    assert serve(harness, tokens(1)) == (0, 0)
    assert serve(harness, tokens(1), extra_key="b") == (0, 0)
    assert serve(harness, tokens(1), extra_key="a", cache_salt="s") == (0, 0)
    assert serve(harness, tokens(1), cache_salt="a") == (0, 0)
    harness.evict(200)
    harness.check()
    assert serve(harness, tokens(1), extra_key="a") == (0, 9)


def test_an_empty_salt_is_no_salt():
    harness = Harness("plt", slots=100)
    serve(harness, tokens(1), cache_salt="")
    assert serve(harness, tokens(1)) == (9, 0)


def events_of(harness: Harness) -> list:
    return harness.cache.take_events()


def test_kv_events_match_those_of_sglang():
    arms = [Harness(kind, slots=64, page_size=4, events=True) for kind in ("plt-hot", "radix")]
    streams = []
    for arm in arms:
        serve(arm, tokens(1, 12))
        serve(arm, tokens(1, 6) + tokens(2, 6))  # splits
        serve(arm, tokens(1, 12), cache_salt="salt")
        arm.evict(64)
        arm.flush()
        streams.append(events_of(arm))
    ours, theirs = streams
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, BlockStored):
            assert (mine.block_hashes, mine.parent_block_hash, mine.token_ids, mine.cache_salt) == (
                other.block_hashes,
                other.parent_block_hash,
                other.token_ids,
                other.cache_salt,
            )
        elif isinstance(mine, BlockRemoved):
            assert sorted(mine.block_hashes) == sorted(other.block_hashes)
        else:
            assert isinstance(mine, AllBlocksCleared)


def test_a_restore_is_a_store_event():
    harness = Harness("plt", slots=64, events=True)
    serve(harness, tokens(1, 12))
    harness.evict(64)
    first = events_of(harness)
    stored = {h for event in first if isinstance(event, BlockStored) for h in event.block_hashes}
    removed = {h for event in first if isinstance(event, BlockRemoved) for h in event.block_hashes}
    assert stored == removed
    serve(harness, tokens(1, 12))
    again = {h for event in events_of(harness) if isinstance(event, BlockStored) for h in event.block_hashes}
    assert again == stored


def test_retracted_request_comes_back_to_its_own_prefix():
    harness = Harness("plt", slots=48)
    request = Request("r", tokens(1, 20))
    harness.admit(request, chunk=8)
    harness.extend(request, 16)
    harness.release(request, checkpoint=False)  # retraction in the middle of a prefill
    harness.check()
    serve(harness, tokens(2, 40))
    again = Request("r", tokens(1, 20))
    assert sum(harness.admit(again)) == 16
    harness.check()
    harness.release(again, checkpoint=True)


def test_chunks_insert_over_nodes_that_are_cold():
    """A request that computes what is cold hands its slots to the cold nodes."""
    harness = Harness("plt", slots=100)
    serve(harness, tokens(1, 30))
    harness.evict(100)
    harness.cache.config = type(harness.cache.config)(restore_threshold=1000)
    request = Request("r", tokens(1, 30))
    assert harness.admit(request, chunk=7) == (0, 0)
    harness.check()
    for end in (14, 21, 30):
        harness.extend(request, end)
        harness.check()
    harness.release(request, checkpoint=True)
    harness.check()
    assert harness.cache.trie.cold_tokens == 0
    encoded = harness.cache.stats.encoded_bytes
    harness.evict(100)
    assert harness.cache.stats.encoded_bytes == encoded, "the blocks were still there"


def test_match_without_a_request_pins_nothing():
    harness = Harness("plt", slots=64)
    serve(harness, tokens(1, 12))
    harness.evict(64)
    match = harness.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens(1, 12))))
    assert match.host_hit_length == 12
    assert all(node.pin_count == 0 for node in harness.cache.trie.nodes())
    harness.check()


def test_touch_keeps_a_prefix_alive():
    harness = Harness("plt-hot", slots=64)
    serve(harness, tokens(1))
    serve(harness, tokens(2))
    harness.cache.touch_prefix(RadixKey(tokens(1)))
    harness.evict(1)
    assert serve(harness, tokens(1)) == (9, 0)


def test_lru_order_of_the_waiting_queue():
    """SGLang's depth-first order walks our nodes through ``root_node`` and ``children``."""
    harness = Harness("plt-hot", slots=100)
    for seed in (1, 2):
        serve(harness, tokens(seed))
    handles = [
        harness.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens(seed)))).last_device_node
        for seed in (1, 2, 2, 1, 2)
    ]
    assert harness.cache.dfs_weight_order(handles) == [1, 2, 4, 0, 3]
