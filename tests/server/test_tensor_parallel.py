"""Two tensor-parallel ranks take the same decisions by the default policy, shown by their decision logs."""

from __future__ import annotations

import json
import random
import re
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
    args = server_args(tiny_llama_dir, 1024, "--tp", "2", "--plt-codec", "fast", "--plt-decision-log", str(log))
    args += ["--plt-near-miss", "on"]
    rng = random.Random(0)
    users = [[rng.randrange(1000, 40000) for _ in range(200)] for _ in range(8)]
    with running(args, SGLANG_CPU_OMP_THREADS_BIND="0|1", SGLANG_PLT_PROFILES=str(tmp_path)) as server:
        host_hits = 0
        for _ in range(3):
            for history in users:
                answer = ask(server, history)
                host_hits += (answer["meta_info"]["cached_tokens_details"] or {"host": 0})["host"]
                history += answer["output_ids"] + [rng.randrange(1000, 40000) for _ in range(20)]
        assert host_hits > 0
        for _ in range(60):  # until both have seen enough rows; then some blocks of the learned codec
            ask(server, [rng.randrange(1000, 40000) for _ in range(150)])
            if server.log_text().count("learned a profile") == 2:
                break
        for history in users:
            ask(server, history[:190])
        donor = [rng.randrange(1000, 40000) for _ in range(400)]
        ask(server, donor)
        near = ask(server, [*donor[:10], 7, *donor[11:], 9])
        assert near["meta_info"]["cached_tokens_details"]["near_miss"] > 300
        check_healthy(server)
        learned = [line for line in server.log_text().splitlines() if "learned a profile" in line]
        started = [line for line in server.log_text().splitlines() if "PLT cache: codec=int8" in line]
    rates = [
        re.search(r"policy=value \(a token: prefill .* ns, \d+ bytes hot, \d+ cold\)", line)[0] for line in started
    ]
    assert len(rates) == 2
    assert len(learned) == 2, "both ranks go over to what they learned"
    assert rates[0] == rates[1], "rank 0 measures for both"
    first, second = (Path(f"{log}.tp{rank}").read_text() for rank in range(2))
    assert first == second
    decisions = [json.loads(line) for line in first.splitlines()]
    assert {"match", "checkpoint", "write", "demote", "restore", "served", "graft"} <= {
        found["event"] for found in decisions
    }
    served = [found for found in decisions if found["event"] == "served" and 200 <= found["tokens"] < 300]
    assert len(served) == 3 * len(users), "the policy learns once from every request"
    assert all(found["output"] == 4 for found in served)
    assert sum(found["matched"] > 150 for found in served) > len(users)
