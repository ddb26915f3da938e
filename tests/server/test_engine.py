"""``sgl.Engine`` takes the backend and our options as keywords."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import sglang as sgl

if __name__ == "__main__":
    engine = sgl.Engine(
        model_path=sys.argv[1],
        device="cpu",
        dtype="float32",
        radix_cache_backend="plt",
        plt_codec="raw",
        plt_cold_bytes="64MB",
        disable_cuda_graph=True,
        max_total_tokens=512,
        max_running_requests=2,
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    prompts = [[1000 + 500 * user + i for i in range(200)] for user in range(4)]
    first = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    again = [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    assert [a["output_ids"] for a in first] == [a["output_ids"] for a in again]
    print("HOST", sum((a["meta_info"]["cached_tokens_details"] or {"host": 0})["host"] for a in again))
    engine.shutdown()
"""


def test_engine_serves_with_keywords(tiny_llama_dir: Path, tmp_path: Path):
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_llama_dir)], capture_output=True, text=True, timeout=400, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "PLT cache: codec=raw" in output
    assert "policy=value (a token: prefill" in output
    assert "cold_budget=64000000" in output
    host = int(next(line for line in output.splitlines() if line.startswith("HOST")).split()[1])
    assert host > 300
