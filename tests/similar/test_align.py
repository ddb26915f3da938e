"""The alignment against a slow dynamic program, under edits, and on sequences that would make it quadratic."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.similar import Run, align
from sglang_plt.similar import chain as chain_module

align_module = sys.modules[Run.__module__]  # the package has the function under its name


def check(reference: np.ndarray, target: np.ndarray, runs: list[Run], min_run: int) -> int:
    """Tokens covered by ``runs``, which keep the contract."""
    end = other_end = 0
    for run in runs:
        assert run.length >= min_run
        assert run.reference >= end
        assert run.target >= other_end
        end, other_end = run.reference + run.length, run.target + run.length
        assert (reference[run.reference : end] == target[run.target : other_end]).all()
        assert len(reference) >= end
        assert len(target) >= other_end
    for run, other in pairwise(runs):
        assert (run.reference + run.length, run.target + run.length) != (other.reference, other.target)
    return sum(run.length for run in runs)


def slow_covered(reference: list[int], target: list[int], min_run: int) -> int:
    """Most tokens that runs of at least ``min_run`` can cover: with 1 the length of the longest common subsequence."""
    n, m = len(reference), len(target)
    best = [[0] * (m + 1) for _ in range(n + 1)]
    equal = [[0] * (m + 1) for _ in range(n + 1)]  # how many tokens before (i, j) are equal
    ending = [[0] * (m + 1) for _ in range(n + 1)]  # the best whose last run ends at (i, j); 0 is none
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            if reference[i - 1] == target[j - 1]:
                equal[i][j] = equal[i - 1][j - 1] + 1
            if equal[i][j] >= min_run:
                ending[i][j] = best[i - min_run][j - min_run] + min_run
                if ending[i - 1][j - 1]:
                    ending[i][j] = max(ending[i][j], ending[i - 1][j - 1] + 1)
            best[i][j] = max(best[i - 1][j], best[i][j - 1], ending[i][j])
    return best[n][m]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two sequences of few different tokens, the second often made of pieces of the first."""
    tokens = st.integers(0, draw(st.integers(0, 4)))
    reference = draw(st.lists(tokens, max_size=40))
    target: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        if reference and draw(st.booleans()):
            start = draw(st.integers(0, len(reference) - 1))
            target += reference[start : start + draw(st.integers(1, 20))]
        else:
            target += draw(st.lists(tokens, max_size=6))
    return np.array(reference, dtype=np.int64), np.array(target[:40], dtype=np.int64)


@settings(max_examples=600)
@given(pairs(), st.integers(1, 6))
def test_no_other_runs_cover_more(pair: tuple[np.ndarray, np.ndarray], min_run: int) -> None:
    """At most 40 x 40 pairs of places are within the budget, so the answer is the best for every ``min_run``."""
    covered = check(*pair, align(*pair, min_run), min_run)
    assert covered == slow_covered(pair[0].tolist(), pair[1].tolist(), min_run)


@settings(max_examples=300)
@given(pairs(), st.integers(1, 6), st.integers(0, 20))
def test_keeps_the_contract_out_of_budget(pair: tuple[np.ndarray, np.ndarray], min_run: int, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align_module, "_FREE_MATCHES", budget)
        patch.setattr(align_module, "_MATCHES_PER_TOKEN", 0)
        covered = check(*pair, align(*pair, min_run), min_run)
    assert covered <= slow_covered(pair[0].tolist(), pair[1].tolist(), min_run)


@settings(max_examples=200)
@given(pairs(), st.integers(1, 6))
def test_colliding_hashes_cost_tokens_and_never_truth(pair: tuple[np.ndarray, np.ndarray], min_run: int) -> None:
    hashes = align_module.gram_hashes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align_module, "gram_hashes", lambda tokens, gram: hashes(tokens, gram) & np.uint64(1))
        check(*pair, align(*pair, min_run), min_run)


def edited(rng: np.random.Generator, reference: np.ndarray, vocabulary: int, gap: int) -> tuple[np.ndarray, int]:
    """``reference`` with an edit about every ``gap`` to ``2 * gap`` tokens, and how many of its tokens were left."""
    parts, at, kept = [], 0, 0
    while len(reference) - at > 2 * gap:
        length = int(rng.integers(gap, 2 * gap))
        parts.append(reference[at : at + length])
        kept += length
        at += length
        removed, added = [(0, 3), (4, 0), (2, 2), (1, 30)][rng.integers(4)]
        parts.append(rng.integers(0, vocabulary, added))
        at += removed
    parts.append(reference[at:])
    kept += len(reference) - at if len(reference) - at >= gap else 0
    return np.concatenate(parts), kept


@pytest.mark.parametrize("vocabulary", [4, 50_000])
@pytest.mark.parametrize("length", [256, 20_000])
def test_covers_what_edits_leave(vocabulary: int, length: int) -> None:
    rng = np.random.default_rng(length + vocabulary)
    for gap in (16, 40, 100):
        reference = rng.integers(0, vocabulary, length)
        target, kept = edited(rng, reference, vocabulary, gap)
        for one, other in ((reference, target), (target, reference)):
            assert check(one, other, align(one, other), 16) >= kept


def test_examples() -> None:
    text = np.random.default_rng(0).integers(0, 50_000, 256)
    assert align(text, text) == [Run(0, 0, 256)]
    assert align(text, text[100:]) == [Run(100, 0, 156)]
    assert align(text, np.concatenate([[-1, -2], text[:50], text[54:]])) == [Run(0, 2, 50), Run(54, 52, 202)]
    swapped = np.concatenate([text[150:], text[:150]])
    assert align(text, swapped) == [Run(0, 106, 150)]
    assert align(text[:20], text[:15]) == []
    assert align(text[:16], text[:16]) == [Run(0, 0, 16)]
    assert align(text[:15], text[:15]) == []
    assert align(text[:0], text) == align(text, text[:0]) == align(text[:0], text[:0]) == []
    assert align(text, text[::-1]) == []
    assert align(text.astype(np.int32), text) == [Run(0, 0, 256)]


def test_a_long_run_is_not_broken_for_more_scattered_tokens() -> None:
    """A longest common subsequence would take the scattered ones, and leave no run that is long enough."""
    run = np.arange(100, 120)
    scattered = np.repeat([1, 2], 20)
    reference, target = np.concatenate([run, scattered]), np.concatenate([scattered[::2], scattered[1::2], run])
    assert align(reference, target) == [Run(0, 40, 20)]


def tiled(pattern: np.ndarray, length: int) -> np.ndarray:
    return np.tile(pattern, length // len(pattern) + 1)[:length]


def hard_pairs() -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Pairs and the fraction of the target that must be covered."""
    rng = np.random.default_rng(0)
    n = 20_000
    one = np.zeros(n, dtype=np.int64)
    spotted = one.copy()
    spotted[rng.integers(0, n, 200)] = 5
    text = rng.integers(0, 50_000, n)
    bits = rng.integers(0, 2, n)
    pattern = tiled(rng.integers(0, 50_000, 100), n)
    rows = [np.concatenate([text[:40], rng.integers(0, 50_000, 4)]) for _ in range(n // 44)]
    table = np.concatenate(rows)
    return {
        "one token": (one, one[:-77], 1.0),
        "one token, 1 % replaced": (one, spotted, 0.9),
        "one token against two": (one, tiled(np.array([0, 1]), n), 0.0),
        "two tokens, out of phase": (tiled(np.array([0, 1]), n), tiled(np.array([1, 0]), n), 0.9),
        "a pattern, out of phase": (pattern, np.roll(pattern, 30), 0.9),
        "a pattern, 1 % edits": (pattern, edited(rng, pattern, 50_000, 60)[0], 0.6),
        "rows with much in common": (table, edited(rng, table, 50_000, 60)[0], 0.9 * 0.85),
        "bits": (bits, rng.integers(0, 2, n), 0.0),
        "unrelated": (text, rng.integers(0, 50_000, n), 0.0),
        "halves swapped": (text, np.roll(text, n // 2), 0.5),
    }


@pytest.mark.parametrize("name", hard_pairs())
def test_work_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, target, fraction = hard_pairs()[name]
    searched = []
    search = chain_module._search

    def counted(rows: np.ndarray, columns: np.ndarray, gram: int) -> list[chain_module.Part]:
        searched.append(len(rows))
        return search(rows, columns, gram)

    monkeypatch.setattr(chain_module, "_search", counted)
    started = time.monotonic()
    runs = align(reference, target)
    assert time.monotonic() - started < 5
    assert sum(searched) <= 20 * (len(reference) + len(target))
    assert check(reference, target, runs, 16) >= fraction * len(target)
    assert align(reference, target) == runs


def test_wrong_arguments_are_refused() -> None:
    tokens = np.arange(20)
    with pytest.raises(ValueError, match="min_run must be at least 1, got 0"):
        align(tokens, tokens, 0)
    with pytest.raises(TypeError, match="float64"):
        align(tokens, tokens * 0.5)
    with pytest.raises(ValueError, match="one dimension"):
        align(tokens.reshape(4, 5), tokens)
