"""Ten cycles of demotion and restore over blocks of real codecs: nothing changes after the first."""

from __future__ import annotations

import pytest
import torch

from tests.cache.coded import PROMPT, CodedHarness

CYCLES = 10


@pytest.mark.parametrize("name", ["int4", "fast", "dense"])
def test_ten_cycles_change_nothing_after_the_first(name):
    harness = CodedHarness(name)
    assert harness.serve() == (0, 0)
    computed = harness.cached_rows()
    found, encoded, held = [], [], []
    for _ in range(CYCLES):
        harness.forget_rows()
        assert harness.cache.trie.cold_tokens == len(PROMPT)
        encoded.append(harness.cache.stats.encoded_bytes)
        assert harness.serve() == (0, len(PROMPT) - 1)
        found.append(harness.cached_rows())
        held.append(harness.cache.cold.store.used_bytes)
    for first, tenth, exact in zip(found[0], found[-1], computed, strict=True):
        assert torch.equal(first, tenth)
        assert torch.equal(first[:4], exact[:4])
        assert not torch.equal(first, exact)  # the codec does change rows: the first time
    assert all(torch.equal(*pair) for rows in found for pair in zip(rows, found[0], strict=True))
    assert encoded[0] > 0
    assert encoded == CYCLES * encoded[:1]
    assert held == CYCLES * held[:1]
    assert harness.cache.stats.restored_tokens == CYCLES * (len(PROMPT) - 1)
    harness.cache.release_host_resources()
