"""Hashes of n-grams and what winnowing keeps of them, against the same in Python's integers; the hashes are pinned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_plt.similar.fragments import as_tokens, gram_hashes, winnow

ALL = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def slow_mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB & ALL
    return value ^ value >> 31


def slow_hashes(tokens: list[int], gram: int) -> list[int]:
    hashes = []
    for start in range(len(tokens) - gram + 1):
        value = 0
        for token in tokens[start : start + gram]:
            value = (value * STEP + slow_mix(token + STEP & ALL)) & ALL
        hashes.append(slow_mix(value))
    return hashes


def slow_winnow(hashes: list[int], window: int) -> list[int]:
    windows = range(max(1, len(hashes) - window + 1)) if hashes else ()
    return sorted({min(hashes[start : start + window]) for start in windows})


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 2), max_size=40),
    st.integers(1, 21),
    st.integers(1, 20),
)
def test_against_python_integers(tokens: list[int], gram: int, window: int) -> None:
    hashes = gram_hashes(np.array(tokens, dtype=np.int64), gram)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == slow_hashes(tokens, gram)
    assert winnow(hashes, window).tolist() == slow_winnow(hashes.tolist(), window)


def test_pinned_hashes() -> None:
    """The same on every machine and in every process: ranks must agree."""
    tokens = np.array([1, 5, 2, 40_000, 7, 7, 0, 151_935, 3, 9], dtype=np.int64)
    assert [hex(value) for value in gram_hashes(tokens, 8).tolist()] == PINNED_8
    assert [hex(value) for value in gram_hashes(tokens, 1)[:2].tolist()] == PINNED_1
    sampled = winnow(gram_hashes(np.arange(100, dtype=np.int64), 16), 16)
    assert [hex(value) for value in sampled.tolist()] == PINNED_SAMPLE


PINNED_8 = ["0x6ae9965df40e0991", "0x9e2a08813d689b30", "0xb47ac966d256a325"]
PINNED_1 = ["0xdce423fc82c0d5b8", "0xac204f0b74af587a"]
PINNED_SAMPLE = [
    "0x38358b1742ebb0a",
    "0x9e30f1909340736",
    "0x180d92496d265afc",
    "0x18ec1d2797b8c1ee",
    "0x1a348781219dd791",
    "0x1d96cea3ef839fe8",
    "0x1f022ba2c713cf4f",
    "0x24fe2d1606b143f6",
    "0x33903ec3c7de8ede",
]


def test_hash_is_where_the_tokens_are_and_not_the_type() -> None:
    tokens = np.random.default_rng(0).integers(0, 1000, 64)
    expected = gram_hashes(tokens, 16)
    assert (gram_hashes(as_tokens(tokens.astype(np.int32)), 16) == expected).all()
    assert (gram_hashes(as_tokens(np.repeat(tokens, 2)[::2]), 16) == expected).all()
    assert (gram_hashes(tokens[10:40], 16) == expected[10:25]).all()


def test_order_of_tokens_matters() -> None:
    shuffled = [np.roll(np.arange(16), shift) for shift in range(16)]
    assert len({gram_hashes(tokens, 16).item() for tokens in shuffled}) == 16


@given(st.data())
def test_a_shared_run_shares_a_fragment(data: st.DataObject) -> None:
    """The guarantee of winnowing, at its edge: ``gram + window - 1`` tokens."""
    gram, window = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocabulary = data.draw(st.sampled_from([2, 50_000]))
    run = rng.integers(0, vocabulary, gram + window - 1)
    sampled = []
    for _ in range(2):
        left, right = (rng.integers(0, vocabulary, rng.integers(0, 60)) for _ in range(2))
        tokens = np.concatenate([left, run, right])
        sampled.append(set(winnow(gram_hashes(tokens, gram), window).tolist()))
    assert sampled[0] & sampled[1]


def test_keeps_few() -> None:
    hashes = gram_hashes(np.random.default_rng(0).integers(0, 50_000, 50_000), 16)
    assert len(winnow(hashes, 16)) / len(hashes) == pytest.approx(2 / 17, rel=0.05)
    assert len(winnow(gram_hashes(np.zeros(1000, dtype=np.int64), 16), 16)) == 1


@pytest.mark.parametrize("tokens", [[0.5], np.zeros(3), np.zeros(3, dtype=bool), np.zeros(3, dtype=np.uint64)])
def test_other_than_integers_are_refused(tokens: object) -> None:
    with pytest.raises(TypeError, match="integers that int64 holds"):
        as_tokens(np.asarray(tokens))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\)"):
        as_tokens(np.zeros((2, 2), dtype=np.int64))
