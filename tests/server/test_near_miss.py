"""Near-miss reuse on a live server with the demo model: answers, refusals, what it leaves behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_plt.serving import ServerProcess
from tests.near_cases import CASES
from tests.server.conftest import check_healthy, running, server_args
from tests.server.test_delta import first_sentence

PAGE = 16


@pytest.fixture(scope="module")
def server(demo_model_dir: Path):
    options = ("--plt-near-miss", "off", "--plt-near-miss-override", "on", "--enable-cache-report")
    pages = ("--page-size", str(PAGE), "--chunked-prefill-size", "128")
    with running(server_args(demo_model_dir, 4096, *options, *pages)) as process:
        yield process


@pytest.fixture(autouse=True)
def healthy(server: ServerProcess):
    server.flush_cache()
    yield
    check_healthy(server)


def ask(server: ServerProcess, text: str, num_new: int, mode: str = "off", salt: str | None = None, **more) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    body = {"text": text, "sampling_params": {**sampling, "custom_params": {"plt_near_miss": mode}}, **more}
    return server.post_json("/generate", body if salt is None else {**body, "cache_salt": salt})


def reused(answer: dict) -> int:
    return (answer["meta_info"]["cached_tokens_details"] or {}).get("near_miss", 0)


def test_answers_with_reused_rows_are_those_of_exact_rows(server: ServerProcess):
    answers, expected = {}, {}
    for case in CASES:
        ask(server, case.reference, 1)
        near = ask(server, case.target + case.question, 6, "on")
        assert (reused(near) > 200) is not case.refused, case.name
        if not case.refused:
            answers[case.name] = first_sentence(near["text"])
            expected[case.name] = first_sentence(ask(server, case.target + case.question, 6)["text"])
        server.flush_cache()
    assert answers == expected
    metrics = server.metrics()
    assert metrics["near_miss_requests_total"] >= len(expected) >= 25
    assert metrics["near_miss_tokens_total"] > 200 * len(expected)


def test_reused_rows_are_served_to_those_who_ask_for_them(server: ServerProcess):
    case = CASES[0]
    ask(server, case.reference, 1)
    prompt = case.target + case.question
    first = ask(server, prompt, 4, "on")
    again = ask(server, prompt, 4, "on")
    assert reused(first) > 200
    assert again["meta_info"]["cached_tokens"] > reused(first)
    assert again["text"] == first["text"]
    exact = ask(server, prompt, 4)
    assert exact["meta_info"]["cached_tokens"] < 100  # what the first one computed before its span
    assert reused(exact) == 0


def test_off_is_what_it_was(server: ServerProcess):
    """With and without a donor around, token by token and logit by logit."""
    case = CASES[0]
    prompt = case.target + case.question
    alone = ask(server, prompt, 4, return_logprob=True)["meta_info"]["output_token_logprobs"]
    server.flush_cache()
    ask(server, case.reference[:40], 1)
    ask(server, case.reference, 1)
    answer = ask(server, prompt, 4, "on", return_logprob=True)
    assert reused(answer)
    beside = ask(server, prompt, 4, return_logprob=True)["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in beside] == [token for _, token, _ in alone]
    assert all(abs(one[0] - other[0]) < 1e-3 for one, other in zip(alone, beside, strict=True))


def test_a_report_computes_everything(server: ServerProcess):
    case = CASES[0]
    ask(server, case.reference, 1)
    answer = ask(server, case.target + case.question, 2, "report")
    assert reused(answer) == 0
    assert "near-miss: tokens" in server.log_text()
    assert "could be reused; predicted deviation" in server.log_text()


def test_salts_are_walls(server: ServerProcess):
    case = CASES[0]
    ask(server, case.reference, 1, salt="a")
    assert reused(ask(server, case.target + case.question, 1, "on", salt="b")) == 0
    assert reused(ask(server, case.target + case.question, 1, "on")) == 0
    assert reused(ask(server, case.target + case.question, 1, "on", salt="a")) > 200


def test_logprobs_of_the_prompt_are_computed(server: ServerProcess):
    case = CASES[0]
    ask(server, case.reference, 1)
    more = {"return_logprob": True, "logprob_start_len": 0}
    answer = ask(server, case.target + case.question, 1, "on", **more)
    assert reused(answer) == 0
    values = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    assert len(values) == answer["meta_info"]["prompt_tokens"]


def test_many_at_once_from_one_donor(server: ServerProcess):
    reference = CASES[0].reference
    ask(server, reference, 1)
    prompts = [reference.replace("318", str(400 + number)) + "The warehouse holds" for number in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: ask(server, prompt, 3, "on"), prompts))
    assert sum(reused(answer) > 200 for answer in answers) >= 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["text"] == ask(server, prompt, 3)["text"]
