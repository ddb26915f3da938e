"""Two ranks whose rows, and so whose blocks, differ: what they decide is the same, line by line."""

from __future__ import annotations

import random
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

from sglang_plt.cache import block_room
from sglang_plt.config import PLTConfig
from tests.cache.delta_codec import DeltaCodec, blocks_of, with_deltas
from tests.cache.harness import Harness, Request

PARTS = [[20 * part + token for token in range(18)] for part in range(3)]


class Agreement:
    """Lets two threads take part in votes, as ranks do."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.given: list[Any] = [None, None]

    def vote(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.barrier.wait(30)
        given = list(self.given)
        self.barrier.wait(30)
        return given


class Rank(DeltaCodec):
    """Of two: sizes are those of its own rows, and each fails where the other does not."""

    def __init__(self, pool: Any, rank: int):
        super().__init__(pool)
        self.rank = rank
        self.chance = random.Random(rank)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        coded = super().encode(*args, **kwargs)
        share = 8 if coded.references else 2
        coded.size = 1 + len(coded[0]) * self.chance.randrange(8, 16) // share
        coded.damaged = self.chance.random() < 0.06
        if self.chance.random() < 0.06:
            raise RuntimeError("this rank fails")
        return coded


def run(rank: int, agreement: Agreement, log: Path, policy: str, found: list[Any]) -> None:
    try:
        config = PLTConfig(restore_threshold=1, write_ahead=32, decision_log=str(log))
        harness = Harness("plt", slots=90, cold_bytes=800, config=config, policy=policy)
        with_deltas(harness)
        cold = harness.cache.cold
        cold.codec = harness.codec = Rank(harness.pool, rank)
        harness.codec.fixed_size = False
        cold._agree_min = lambda value: min(agreement.vote(rank, value))
        cold._room._agree_max = lambda values: [max(pair) for pair in zip(*agreement.vote(rank, values), strict=True)]
        requests = random.Random(3)
        for number in range(250):
            first, second = requests.choice(PARTS), requests.choice(PARTS)
            text = [1000 + number % 5] * requests.randrange(1, 3) + first + second[: requests.randrange(18)]
            request = Request("r", array("q", text), *requests.choice([(None, None)] * 3 + [("lora", None)]))
            harness.admit(request)
            harness.release(request, checkpoint=requests.random() < 0.9)
            harness.check()
            assert not harness.codec.broken
        stats, sizes = cold.stats, [block.num_bytes for block in blocks_of(harness)]
        own = [len(block.data or ()) for block in blocks_of(harness)]
        found[rank] = (sizes, own, stats.near_accepted, harness.codec.num_near, stats.restore_failures)
    except BaseException:
        agreement.barrier.abort()
        raise


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_they_decide_alike(tmp_path, monkeypatch, policy):
    monkeypatch.setattr(block_room, "BLOCK_TOKENS", 8)
    agreement, found = Agreement(), [None, None]
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = [threading.Thread(target=run, args=(rank, agreement, log, policy, found)) for rank, log in enumerate(logs)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert None not in found
    (sizes, own, accepted, near, failures), (other_sizes, others_own, *same) = found
    lines, other_lines = (Path(f"{log}.tp0").read_text().splitlines() for log in logs)
    assert lines == other_lines
    assert (sizes, accepted, failures) == (other_sizes, same[0], same[2])
    assert own != others_own, "the blocks of both are of one size: nothing was tested"
    assert min(near, same[1], failures) > 0
    assert sum('"drop_cold"' in line for line in lines) > 20
