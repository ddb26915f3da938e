"""What a plan reuses, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_plt.near_miss import Limits, Refusal, plan_spans

LIMITS = Limits()
TEXT = np.random.default_rng(0).integers(0, 50_000, 3000)


def edited(*edits: tuple[int, int, list[int]]) -> np.ndarray:
    """``TEXT`` with ``(first, end, replacement)``, in ascending order."""
    parts, at = [], 0
    for first, end, new in edits:
        parts += [TEXT[at:first], np.array(new, np.int64)]
        at = end
    return np.concatenate([*parts, TEXT[at:]])


def test_one_word_near_the_top():
    prompt = edited((40, 42, [70_000]))
    (span,) = plan_spans(TEXT, prompt, 40, 1, LIMITS)
    assert (span.start, span.stop, span.donor, span.differing) == (41 + 16, 2999 - 16, 42 + 16, 2)


def test_what_is_there_already_is_not_planned():
    prompt = edited((40, 42, [70_000]))
    (span,) = plan_spans(TEXT, prompt, 1000, 1, LIMITS)
    assert span.start == 1001  # one token is computed, its forward pass ends where the span begins


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_spans_are_whole_pages(page_size):
    prompt = edited((40, 42, [70_000]), (1500, 1500, [1, 2, 3]))
    spans = plan_spans(TEXT, prompt, 32, page_size, LIMITS)
    assert len(spans) == 2
    for span in spans:
        assert span.start % page_size == span.stop % page_size == 0
        assert np.array_equal(prompt[span.start : span.stop], TEXT[span.donor : span.donor + len(span)])


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (edited((2, 3, [70_000])), Refusal.FIRST_TOKENS),
        (edited((0, 0, [70_000])), Refusal.FIRST_TOKENS),
        (TEXT[1500:], Refusal.FIRST_TOKENS),
        (edited((100, 400, list(range(70_000, 70_300)))), Refusal.DIFFERENT),
        (edited((100, 101, [int(TEXT[900])]), (900, 901, [int(TEXT[100])])), Refusal.MOVED),
        (edited((100, 140, []), (900, 900, TEXT[100:140].tolist())), Refusal.MOVED),
        (edited((100, 140, TEXT[900:940].tolist()), (900, 940, TEXT[100:140].tolist())), Refusal.MOVED),
        (edited((100, 103, TEXT[2000:2003].tolist()), (2000, 2003, [1, 2, 3])), Refusal.MOVED),
        (np.concatenate([TEXT[:100], [70_000], TEXT[101:300]]), Refusal.SHORT),
        (np.arange(100_000, 101_000), Refusal.FIRST_TOKENS),
    ],
)
def test_refusals(prompt, reason):
    assert plan_spans(TEXT, prompt, 0, 1, LIMITS) is reason


def test_what_follows_an_echo_of_the_context_is_computed():
    text = TEXT.copy()
    text[1500:1502] = text[38:40]
    prompt = np.concatenate([text[:40], [70_000], text[42:]])
    first, second = plan_spans(text, prompt, 40, 1, LIMITS)
    assert (first.stop, second.start) == (1500, 1500 + LIMITS.recompute)  # from the second of the two tokens on
    for at in (1600, 1700, 1800):  # now it is common
        text[at : at + 2] = text[38:40]
    prompt = np.concatenate([text[:40], [70_000], text[42:]])
    assert len(plan_spans(text, prompt, 40, 1, LIMITS)) == 1


def test_the_same_change_in_two_places_is_no_move():
    prompt = edited((100, 101, [70_000]), (900, 901, [70_000]))
    assert len(plan_spans(TEXT, prompt, 100, 1, LIMITS)) == 2


def test_only_the_part_behind_many_changes_is_refused():
    prompt = edited((1000, 1060, list(range(70_000, 70_060))), (1500, 1501, [90_000]))
    spans = plan_spans(TEXT, np.concatenate([prompt[:40], [80_000], prompt[41:]]), 0, 1, LIMITS)
    assert [span.stop for span in spans] == [1000]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_spans_hold_equal_tokens_and_nothing_that_differs(data):
    count = data.draw(st.integers(0, 5))
    places = sorted(data.draw(st.lists(st.integers(0, 2900), min_size=count, max_size=count, unique=True)))
    edits, last = [], -1
    for place in places:
        if place <= last:
            continue
        end = place + data.draw(st.integers(0, 6))
        edits.append((place, end, data.draw(st.lists(st.integers(0, 60_000), max_size=6))))
        last = end
    prompt = edited(*edits)
    matched = data.draw(st.integers(0, 200))
    page = data.draw(st.sampled_from([1, 4, 16]))
    spans = plan_spans(TEXT, prompt, matched, page, LIMITS)
    if isinstance(spans, Refusal):
        return
    assert all(span.differing <= LIMITS.max_difference_before * span.start for span in spans)
    end = matched
    for span in spans:
        assert end < span.start < span.stop <= len(prompt) - LIMITS.tail
        assert np.array_equal(prompt[span.start : span.stop], TEXT[span.donor : span.donor + len(span)])
        assert span.differing <= LIMITS.max_difference * span.stop
        end = span.stop
    assert LIMITS.min_tokens <= sum(map(len, spans))
    assert len(spans) <= LIMITS.max_spans
