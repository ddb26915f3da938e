"""Agreement of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_agree_min(group: Any) -> Callable[[int], int]:
    """The smallest of an integer over a CPU process group; the identity for one rank.

    Every rank must call it the same number of times in the same order, which holds because the decisions that lead to
    a call are the same on all ranks.
    """
    if group is None or torch.distributed.get_world_size(group) == 1:
        return lambda value: value

    def agree(value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
        return int(tensor.item())

    return agree
