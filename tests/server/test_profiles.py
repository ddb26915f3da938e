"""A server without a profile learns one and goes over to it; a wrong profile is refused at start."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sglang_plt.serving import ServerProcess, ServerStartError
from tests.server.conftest import check_healthy, running, server_args
from tests.tiny_model import make_tiny_llama


def ask(server: ServerProcess, tokens: list[int], num_new: int = 4) -> dict:
    return server.post_json(
        "/generate",
        {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}},
    )


@pytest.mark.parametrize(("codec", "qk_norm"), [("dense", False), ("fast", True)], ids=["llama-dense", "qwen3-fast"])
def test_learns_a_profile_while_serving(tmp_path: Path, codec: str, qk_norm: bool):
    model = make_tiny_llama(tmp_path / "model", qk_norm=qk_norm)
    args = server_args(model, 1024, "--plt-codec", codec, "--plt-cold-fraction", "8")
    rng = random.Random(0)
    with running(args, SGLANG_PLT_PROFILES=str(tmp_path)) as server:
        found = re.search(rf"codec=int8/1 \(keys without RoPE; {codec} after (\d+) tokens\)", server.log_text())
        wanted = int(found[1])
        host_hits = {False: 0, True: 0}
        for _ in range(40 + wanted // 1600):  # a fit takes longer on a busy machine
            learned = "learned a profile" in server.log_text()
            users = [[rng.randrange(1000, 40000) for _ in range(200)] for _ in range(8)]
            for history in users + users:
                answer = ask(server, history)
                host_hits[learned] += (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]
            if learned and host_hits[True] > 1000:
                break
        assert f"new blocks are stored as {codec}/2" in server.log_text()
        assert min(host_hits.values()) > 1000, "blocks of both codecs are restored"
        check_healthy(server)


def test_refuses_a_wrong_profile(tiny_llama_dir: Path, tmp_path: Path):
    file = tmp_path / "profile.safetensors"
    file.write_bytes(b"garbage")
    args = server_args(tiny_llama_dir, 1024, "--plt-codec", "fast", "--plt-profile", str(file))
    with pytest.raises(ServerStartError, match="cannot be read") as caught, running(args):
        pass
    assert str(file) in str(caught.value)
