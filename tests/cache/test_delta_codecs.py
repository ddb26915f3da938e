"""Prompts that are nearly the same, in blocks of the real codecs: small, right, and a miss where they are damaged."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from tests.cache.coded import PROMPT, CodedHarness
from tests.cache.delta_codec import blocks_of
from tests.codec.correlated import STEP

OTHER = array("q", [400, 401, *PROMPT[1:260], 402, *PROMPT[260:299]])  # shifted by one, with an edit near its end
CYCLES = 10

pytestmark = pytest.mark.parametrize("name", ["fast", "dense"])


@pytest.fixture
def harness(name):
    harness = CodedHarness(name)
    assert harness.serve() == (0, 0)
    harness.forget_rows()
    assert harness.serve(OTHER) == (0, 0)
    harness.forget_rows()
    assert harness.cache.stats.encode_failures == 0
    yield harness
    harness.cache.release_host_resources()


def restored(harness: CodedHarness, prompt: array) -> list[torch.Tensor]:
    """Rows of ``prompt`` that the cold tier brought back."""
    harness.forget_rows()
    assert harness.serve(prompt) == (0, len(prompt) - 1)
    return harness.cached_rows(prompt)


def error(harness: CodedHarness, prompt: array, rows: list[torch.Tensor]) -> float:
    """Root mean square of what ``rows`` differ from those that were computed."""
    exact = harness.buffers(harness.computed(prompt))
    differences = [row - whole[: len(row)] for row, whole in zip(rows, exact, strict=True)]
    return float(torch.cat([difference.flatten() for difference in differences]).square().mean().sqrt())


def views(harness: CodedHarness, prompt: array) -> list:
    """Of the node with all of a prompt, or nearly so."""
    return next(node.views for node in harness.cache.trie.nodes() if node.key.tokens[0] == prompt[0])


def same(rows: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(rows, others, strict=True))


def test_a_near_prompt_takes_a_fraction_and_comes_back_as_well(harness):
    first, second = (sum(view.block.num_bytes for view in views(harness, prompt)) for prompt in (PROMPT, OTHER))
    assert second < 0.4 * first, (first, second)
    assert harness.cache.stats.near_saved_bytes > 0
    whole, delta = (restored(harness, prompt) for prompt in (PROMPT, OTHER))
    # differences below the dead zone are left as they are: noise, and the reference's own error
    rounding = STEP / 12**0.5
    assert error(harness, PROMPT, whole) < 1.05 * rounding
    assert error(harness, OTHER, delta) < 1.4 * rounding
    exact = harness.buffers(harness.computed(OTHER))
    assert all(torch.equal(row[:4], other[:4]) for row, other in zip(delta, exact, strict=True))


def test_it_outlives_the_prompt_that_it_resembles(harness):
    before = restored(harness, OTHER)
    harness.forget_rows()
    node = next(node for node in harness.cache.trie.nodes() if node.key.tokens[0] == PROMPT[0])
    for below in (*node.children.values(), node):
        harness.cache.cold._room.drop_cold(below)
    harness.check()
    assert harness.cache.cold.store.num_orphans > 0
    assert same(restored(harness, OTHER), before)


def test_damage_of_what_it_resembles_is_a_miss_and_no_wrong_row(harness):
    damaged = views(harness, PROMPT)[0].block
    bytes_ = np.array(damaged.data)
    bytes_[len(bytes_) // 2] ^= 1
    damaged.data = bytes_
    assert harness.serve(OTHER) == (0, len(OTHER) - 1)  # promised, then computed
    stats = harness.cache.stats
    assert (stats.restore_failures, stats.restored_tokens) == (1, 0)
    assert error(harness, OTHER, harness.cached_rows(OTHER)) == 0
    assert error(harness, OTHER, restored(harness, OTHER)) > 0
    assert stats.restore_failures == 1
    harness.forget_rows()
    assert harness.serve() == (0, len(PROMPT) - 1)
    assert error(harness, PROMPT, harness.cached_rows()) == 0
    assert stats.restore_failures == 2


def test_ten_cycles_change_nothing(harness):
    first = [restored(harness, prompt) for prompt in (PROMPT, OTHER)]
    encoded, held = harness.cache.stats.encoded_bytes, harness.cache.cold.store.used_bytes
    kept = [id(block) for block in blocks_of(harness)]
    for _ in range(CYCLES):
        for prompt, rows in zip((PROMPT, OTHER), first, strict=True):
            assert same(restored(harness, prompt), rows)
    assert [id(block) for block in blocks_of(harness)] == kept
    assert (harness.cache.stats.encoded_bytes, harness.cache.cold.store.used_bytes) == (encoded, held)
