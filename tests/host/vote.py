"""One rank of a vote; on its own, so that a spawned process imports nothing else."""

from pathlib import Path

import torch

from sglang_plt.host.ranks import make_agree_min


def vote(rank: int, store: str, answers: list[str]) -> None:
    """Take part in two votes as ``rank`` of two and write what they gave."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    agree = make_agree_min(torch.distributed.group.WORLD)
    Path(answers[rank]).write_text(f"{agree(rank + 3)} {agree(9 - rank)}")
    torch.distributed.destroy_process_group()
