"""Two tensor-parallel ranks take the same decisions, shown by their decision logs."""

from __future__ import annotations

import json
import random
from pathlib import Path

from sglang_plt.serving import ServerProcess
from tests.server.conftest import check_healthy, running, server_args


def ask(server: ServerProcess, tokens: list[int], num_new: int = 4) -> dict:
    return server.post_json(
        "/generate",
        {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}},
    )


def test_ranks_take_identical_decisions(tiny_llama_dir: Path, tmp_path: Path):
    log = tmp_path / "decisions"
    args = server_args(tiny_llama_dir, 1024, "--tp", "2", "--plt-codec", "int8", "--plt-decision-log", str(log))
    rng = random.Random(0)
    users = [[rng.randrange(1000, 40000) for _ in range(200)] for _ in range(8)]
    with running(args, SGLANG_CPU_OMP_THREADS_BIND="0|1") as server:
        host_hits = 0
        for _ in range(3):
            for history in users:
                answer = ask(server, history)
                host_hits += (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]
                history += answer["output_ids"] + [rng.randrange(1000, 40000) for _ in range(20)]
        assert host_hits > 0
        check_healthy(server)
    first, second = (Path(f"{log}.tp{rank}").read_text() for rank in range(2))
    assert first == second
    events = [json.loads(line)["event"] for line in first.splitlines()]
    assert {"match", "checkpoint", "write", "demote", "restore"} <= set(events)
