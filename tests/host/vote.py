"""One rank of two that agree; on its own, so that a spawned process imports nothing else."""

from pathlib import Path

import torch

from sglang_plt.host.ranks import from_rank_0, make_agree_min


def vote(rank: int, store: str, answers: list[str]) -> None:
    """Take part in two votes and a measurement as ``rank`` of two and write what they gave."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agree = make_agree_min(torch.distributed.group.WORLD)
    measured = from_rank_0(torch.distributed.group.WORLD, lambda: (10**15 + rank, rank), 2)
    Path(answers[rank]).write_text(f"{agree(rank + 3)} {agree(9 - rank)} {measured}")
    torch.distributed.destroy_process_group()
