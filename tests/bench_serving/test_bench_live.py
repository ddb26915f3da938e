"""One server of ours: SGLang's own benchmark runs against it, and so does this one."""

import json
import subprocess
import sys

import pytest

from bench_serving import bench
from sglang_plt.results import read_rows
from tests.server.conftest import check_healthy, running, server_args


@pytest.fixture(scope="module")
def server(tiny_llama_dir):
    args = server_args(tiny_llama_dir, 1200, "--plt-codec", "raw", "--plt-cold-fraction", "8", "--enable-cache-report")
    with running(args) as server:
        yield server


def test_the_benchmark_of_sglang_runs(server, tiny_llama_dir, tmp_path):
    """The command of the README, with less to do."""
    sizes = {
        "num-groups": 4, "prompts-per-group": 2, "num-turns": 2, "system-prompt-len": 200, "question-len": 20,
        "output-len": 4,
    }  # fmt: skip
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--base-url", server.url),
        *("--model", str(tiny_llama_dir), "--dataset-name", "generated-shared-prefix", "--cache-report"),
        *("--max-concurrency", "1", "--disable-tqdm", "--output-file", str(tmp_path / "out.jsonl")),
        *(word for name, size in sizes.items() for word in (f"--gsp-{name}", str(size))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
    result = json.loads(line)
    assert result["completed"] == 16
    report = result["cache_report"]
    assert report["total_cached_tokens"] > 8 * 200
    assert report["device_cached_tokens"] + report["host_cached_tokens"] == report["total_cached_tokens"]
    check_healthy(server)


def test_this_benchmark_runs_against_a_server(server, tiny_llama_dir, tmp_path, capsys):
    server.flush_cache()
    argv = ["--url", server.url, "--workloads", "multi_turn", "--scale", "0.5", "--name", "plt-raw", "--repeats", "2"]
    bench.main([*argv, "--model-path", str(tiny_llama_dir), "--output", str(tmp_path / "out")])
    assert "/flush_cache" not in capsys.readouterr().err
    rows = {
        row.metric: row for row in read_rows(tmp_path / "out/rows.json") if row.arm.startswith("multi_turn/plt-raw")
    }
    assert rows["failed_share"].value == 0
    assert rows["failed_share"].n == 2 * 6 * 4
    # all that was sent before, but what the restore of a partly filled pool has to leave out
    assert 0.6 < rows["cached_share"].value < 0.8
    assert rows["warm_restore_ms"].value > 0
    check_healthy(server)
