"""Live servers on the tiny model. Starting one takes half a minute: share it, and never run two at a time."""

import random
import re
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_plt.serving import ServerProcess

# every batch is checked for leaks, double frees and use after free; the scheduler dies of the first
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}

# the tiny model gains nothing by threads, and on a shared machine they wait for one another
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_BAD = re.compile(
    r"leak|Traceback|AssertionError|use-after-free|double free|cannot be (restored|encoded)", re.IGNORECASE
)


def server_args(model: Path, pool_tokens: int, *more: str) -> list[str]:
    """A float32 server on the CPU with this cache; later flags override earlier ones."""
    return [
        *("--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--disable-cuda-graph"),
        *("--max-total-tokens", str(pool_tokens), "--max-running-requests", "16", "--random-seed", "0"),
        *("--enable-metrics", "--radix-cache", "plt", "--plt-restore-threshold", "1", *more),
    ]


@contextmanager
def running(args: list[str], **env: str) -> Iterator[ServerProcess]:
    """A strict server."""
    with ServerProcess(args, env={**STRICT, **ONE_THREAD, **env}, timeout_s=400) as server:
        yield server


def check_healthy(server: ServerProcess) -> None:
    """The server lives, gives all its memory back, and has complained about nothing."""
    assert server.alive, "\n".join(server.log_tail(60))
    server.flush_cache()
    metrics = server.metrics()
    assert metrics["tokens_hot"] == 0
    assert metrics["tokens_cold"] == 0
    assert metrics["cold_bytes"] == 0
    assert metrics["restore_failures_total"] == 0
    assert metrics["encode_failures_total"] == 0
    bad = [line for line in server.log_text().splitlines() if _BAD.search(line) and "server_args=" not in line]
    assert not bad, "\n".join(bad[:20])


def make_text(rng: random.Random, num_words: int) -> str:
    """Words of no meaning, a token or two each."""
    words = ("river", "stone", "cloud", "lantern", "harbor", "violin", "winter", "copper", "meadow", "falcon", "table")
    return " ".join(rng.choice(words) for _ in range(num_words))


class Case:
    """What SGLang's kits need of ``unittest.TestCase``; pytest cannot parametrise that class itself.

    Needs a fixture ``server``; after every test the server must be healthy.
    """

    _case = unittest.TestCase()
    assertEqual = _case.assertEqual
    assertIsNone = _case.assertIsNone
    assertIn = _case.assertIn
    assertGreater = _case.assertGreater
    assertGreaterEqual = _case.assertGreaterEqual

    @pytest.fixture(autouse=True)
    def _attach(self, server, tiny_llama_dir):
        cls = type(self)
        cls.server, cls.base_url, cls.process, cls.model = server, server.url, server.process, str(tiny_llama_dir)
        server.flush_cache()
        yield
        check_healthy(server)

    @classmethod
    def restored_tokens(cls):
        return cls.server.metrics()["restored_tokens_total"]
