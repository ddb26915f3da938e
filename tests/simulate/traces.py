"""Traces of the tests: the published ones where they are, and a generated one."""

import os
from pathlib import Path

import pytest

from sglang_plt.simulate.agents import write_agents
from sglang_plt.simulate.trace import Trace, read_trace
from tests.tiny_model import REPO

FOLDER = Path(os.environ.get("SGLANG_PLT_TRACES", REPO.parent / "shared" / "data" / "traces"))


def published(name: str) -> Trace:
    """A Mooncake trace; skips the test where it is absent."""
    path = FOLDER / f"mooncake_{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent; SGLANG_PLT_TRACES names the folder of the published traces")
    return read_trace(path)


def generated(folder: Path, num_requests: int = 1500, seed: int = 7) -> Trace:
    path = folder / "agents.jsonl"
    write_agents(path, seed, num_requests)
    return read_trace(path)
