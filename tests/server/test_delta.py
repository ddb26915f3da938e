"""Near-duplicate prompts on a live server with the demo model: stored as differences, answered as before."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sglang_plt.serving import ServerProcess
from tests.adversarial import CASES
from tests.server.conftest import check_healthy, make_text, running, server_args

POOL = 1024


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, demo_profile: Path):
    options = ("--plt-codec", "dense", "--plt-profile", str(demo_profile), "--plt-cold-bytes", "64MiB")
    with running(server_args(demo_model_dir, POOL, *options)) as process:
        yield process


@pytest.fixture(autouse=True)
def healthy(server: ServerProcess):
    server.flush_cache()
    yield
    check_healthy(server)


def ask(server: ServerProcess, text: str, num_new: int, salt: str | None = None) -> dict:
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}}
    return server.post_json("/generate", body if salt is None else {**body, "cache_salt": salt})


def demote_all(server: ServerProcess) -> None:
    rng = random.Random(0)
    for _ in range(3):
        ask(server, make_text(rng, POOL // 2), 1)


def first_sentence(text: str) -> str:
    """The answer; what the model rambles on to behind it may turn on a near tie, with any lossy rows."""
    return re.split(r"[.\n]", text, maxsplit=1)[0]


def host_hit(answer: dict) -> int:
    return (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]


def test_answers_from_differences_are_those_of_exact_rows(server: ServerProcess):
    exact = {}
    for case in CASES:
        ask(server, case.reference, 1)
        exact[case.name] = first_sentence(ask(server, f"{case.target}\n{case.question}", 8)["text"])
    demote_all(server)
    assert server.metrics()["blocks_delta"] >= len(CASES) - 1
    answers = {case.name: ask(server, f"{case.target}\n{case.question}", 8) for case in CASES}
    assert {name: first_sentence(answer["text"]) for name, answer in answers.items()} == exact
    assert all(host_hit(answer) > 100 for answer in answers.values())


def test_another_salt_is_another_world(server: ServerProcess):
    case, before = CASES[0], server.metrics()["near_candidates_total"]
    for salt, text in (("a", case.reference), ("b", case.target)):
        ask(server, text, 1, salt)
    demote_all(server)
    metrics = server.metrics()
    assert metrics["blocks_delta"] == 0
    assert metrics["near_candidates_total"] == before
    ask(server, case.target, 1, "a")
    demote_all(server)
    assert server.metrics()["blocks_delta"] >= 1, "within one salt they meet"
