"""A server without a profile learns one and goes over to it; a wrong profile is refused at start."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sglang_plt.serving import ServerProcess, ServerStartError
from tests.server.conftest import check_healthy, running, server_args


def ask(server: ServerProcess, tokens: list[int], num_new: int = 4) -> dict:
    return server.post_json(
        "/generate",
        {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}},
    )


def test_learns_a_profile_while_serving(tiny_llama_dir: Path, tmp_path: Path):
    args = server_args(tiny_llama_dir, 1024, "--plt-codec", "dense", "--plt-cold-fraction", "8")
    rng = random.Random(0)
    with running(args, SGLANG_PLT_PROFILES=str(tmp_path)) as server:
        wanted = int(re.search(r"codec=int8/1 \(.*; dense after (\d+) tokens\)", server.log_text())[1])
        host_hits = {False: 0, True: 0}
        for _ in range(6 + wanted // 1600):
            learned = "learned a profile" in server.log_text()
            users = [[rng.randrange(1000, 40000) for _ in range(200)] for _ in range(8)]
            for history in users + users:
                answer = ask(server, history)
                host_hits[learned] += (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]
            if learned and host_hits[True] > 1000:
                break
        assert "new blocks are stored as dense/1" in server.log_text()
        assert min(host_hits.values()) > 1000, "blocks of both codecs are restored"
        check_healthy(server)


def test_refuses_a_wrong_profile(tiny_llama_dir: Path, tmp_path: Path):
    file = tmp_path / "profile.safetensors"
    file.write_bytes(b"garbage")
    args = server_args(tiny_llama_dir, 1024, "--plt-codec", "fast", "--plt-profile", str(file))
    with pytest.raises(ServerStartError, match="cannot be read") as caught, running(args):
        pass
    assert str(file) in str(caught.value)
