"""Log-probabilities that a request computed anyway reach the edge of its answer."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace

import pytest

from sglang_plt.cache.model_bits import model_bits
from sglang_plt.probability import BIT, ONE
from tests.cache.harness import Harness, Request


def reader(values, prompt_len=4):
    req = SimpleNamespace(
        return_logprob=True,
        origin_input_ids=array("q", range(prompt_len)),
        logprob=SimpleNamespace(output_token_logprobs_val=values),
    )
    return model_bits(req)


def test_sums_what_the_model_generated():
    read = reader([math.log(0.5), math.log(0.25), 0.0])
    assert read(4, 7) == pytest.approx(3 * BIT, abs=3)
    assert read(5, 6) == pytest.approx(2 * BIT, abs=1)
    assert read(7, 7) == 0


@pytest.mark.parametrize("span", [(3, 5), (0, 2), (4, 8), (6, 8)])
def test_what_was_not_computed_is_unknown(span):
    assert reader([-1.0, -1.0, -1.0])(*span) is None


@pytest.mark.parametrize("values", [None, [None, -1.0], [[-1.0], -1.0]])
def test_other_shapes_are_unknown(values):
    assert reader(values)(4, 6) is None


def test_impossible_tokens_are_finite():
    assert reader([-math.inf])(4, 5) == reader([math.nan])(4, 5) == int(10_000 / math.log(2) * BIT)


def test_requests_without_log_probabilities_have_none():
    assert model_bits(SimpleNamespace()) is None
    assert model_bits(SimpleNamespace(return_logprob=False)) is None


@pytest.mark.parametrize("returned", [True, False])
def test_an_answer_is_inserted_with_its_probability(returned):
    harness = Harness("plt-hot", slots=64)
    request = Request("r", array("q", [1, 2, 3]))
    harness.admit(request)
    for token in (7, 8):
        harness.decode(request, token)
    request.return_logprob = returned
    request.logprob = SimpleNamespace(output_token_logprobs_val=[math.log(0.5), 0.0])
    harness.release(request, checkpoint=True)
    (answer,) = [node for node in harness.cache.trie.nodes() if node.start == 3]
    assert answer.model_bits == (BIT if returned else None)
    assert answer.weight == ONE + (ONE // 2 if returned else 0)
    harness.check()
