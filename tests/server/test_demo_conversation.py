"""The same conversations on a pool that is too small for them and on one that never evicts: no token may differ.

Requests go one at a time, so that the pool's size is all that differs between the two servers.
"""

import random
from dataclasses import dataclass, field

import pytest

from sglang_plt.demo import DemoOptions, run_demo
from tests.server.conftest import check_healthy, running

USERS, TURNS, NEW_TOKENS = 6, 3, 12
SMALL_POOL, LARGE_POOL = 600, 8192
ROW_BYTES = 2 * 2 * 2 * 32 * 4  # keys and values of two layers, two heads, float32


@dataclass
class Conversations:
    """What one server answered, request by request, and its metrics at the end."""

    output_ids: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt: list = field(default_factory=list)
    device: list = field(default_factory=list)
    host: list = field(default_factory=list)
    metrics: dict = field(default_factory=dict)
    log: str = ""


def hold(server):
    """Chats of several users in turn; every prompt is the history so far and a new question."""
    rng = random.Random(7)
    said = Conversations()
    histories = [[rng.randrange(1000, 40000) for _ in range(150)] for _ in range(USERS)]
    for _ in range(TURNS):
        for history in histories:
            history += [rng.randrange(1000, 40000) for _ in range(35)]
            sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            payload = {"input_ids": history, "sampling_params": sampling, "return_logprob": True}
            answer = server.post_json("/generate", payload)
            meta = answer["meta_info"]
            details = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
            assert details["device"] + details["host"] == meta["cached_tokens"]
            said.output_ids.append(answer["output_ids"])
            said.logprobs.append([entry[0] for entry in meta["output_token_logprobs"]])
            said.prompt.append(meta["prompt_tokens"])
            said.device.append(details["device"])
            said.host.append(details["host"])
            history += answer["output_ids"]
    said.metrics = server.metrics()
    said.log = server.log_text()
    return said


def options(model, pool_tokens):
    return DemoOptions(model, codec="raw", users=4, turns=2, max_total_tokens=pool_tokens, cold_fraction=6.0)


@pytest.fixture(scope="module")
def small(tiny_llama_dir):
    """The conversations, and the demo's own, on the small pool."""
    chosen = options(tiny_llama_dir, SMALL_POOL)
    with running(chosen.server_args(on_gpu=False)) as server:
        said = hold(server)
        check_healthy(server)
        turns = []
        demo = run_demo(chosen, server, turns.append)
        assert turns == demo.turns
        check_healthy(server)
    return said, demo


@pytest.fixture(scope="module")
def large(tiny_llama_dir, small):
    with running(options(tiny_llama_dir, LARGE_POOL).server_args(on_gpu=False)) as server:
        said = hold(server)
        check_healthy(server)
    return said


def test_metrics_agree_with_what_the_requests_were_told(small):
    said, _ = small
    metrics = said.metrics
    restored = sum(said.host)
    assert restored > 0
    assert metrics["restored_tokens_total"] == restored
    assert metrics["restores_total"] == sum(tokens > 0 for tokens in said.host)
    assert metrics["restore_seconds_count"] >= metrics["restores_total"]
    assert metrics["evicted_tokens_total_demoted"] >= restored
    assert metrics["evicted_tokens_total_hot"] == 0
    assert metrics["evicted_tokens_total_cold"] == 0
    assert metrics["decoded_bytes_total"] >= restored * ROW_BYTES
    assert 0 < metrics["tokens_hot"] <= SMALL_POOL
    held = USERS * (150 + TURNS * (35 + NEW_TOKENS))
    # the last token of an answer has no KV yet; the warm-up and the health check leave a few tokens of their own
    assert 0 <= metrics["tokens_hot"] + metrics["tokens_cold"] - (held - USERS) <= 64
    assert metrics["cold_budget_bytes"] == 6 * SMALL_POOL * ROW_BYTES
    assert metrics["tokens_cold"] * ROW_BYTES <= metrics["cold_bytes"] <= metrics["cold_budget_bytes"]


def test_the_log_says_what_was_configured(small):
    said, _ = small
    assert "PLT cache: codec=raw" in said.log
    assert f"cold_budget={6 * SMALL_POOL * ROW_BYTES} bytes a rank (6.00 times the pool)" in said.log


def test_the_demo_sees_the_same(small):
    _, demo = small
    assert [turn.turn for turn in demo.turns] == [1] * 4 + [2] * 4
    assert all(turn.computed > 0 for turn in demo.turns)
    assert all(turn.device + turn.restored > 100 for turn in demo.turns[4:])
    assert sum(turn.restored > 100 for turn in demo.turns[4:]) >= 2  # which ones is up to the policy
    assert all(0 < turn.first_token_s <= turn.total_s for turn in demo.turns)
    assert demo.share("device") + demo.share("restored") + demo.share("computed") == pytest.approx(1)
    assert demo.pool_token_bytes == ROW_BYTES
    assert ROW_BYTES <= demo.cold_token_bytes < 1.1 * ROW_BYTES
    assert demo.held_tokens > 1.5 * SMALL_POOL


def test_outputs_are_the_same_token_for_token(small, large):
    said, _ = small
    assert said.output_ids == large.output_ids
    assert all(len(output) == NEW_TOKENS for output in said.output_ids)
    for mine, other in zip(said.logprobs, large.logprobs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_the_small_pool_restores_what_the_large_one_keeps(small, large):
    said, _ = small
    assert sum(said.prompt) == sum(large.prompt) > 4 * SMALL_POOL
    assert sum(large.host) == 0
    assert large.metrics["restored_tokens_total"] == 0
    later = slice(USERS, None)
    assert all(tokens > 0 for tokens in said.host[later])
    # nothing but the new question, and what the answer's end adds, is computed again
    reused = [device + host for device, host in zip(said.device, said.host, strict=True)]
    assert reused == large.device
