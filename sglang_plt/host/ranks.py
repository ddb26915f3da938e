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


def make_agree_max(group: Any) -> Callable[[list[int]], list[int]]:
    """The largest of each of a few integers over a CPU process group; as :func:`make_agree_min`."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return lambda values: values

    def agree(values: list[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
        return tensor.tolist()

    return agree


def from_rank_0(group: Any, measure: Callable[[], tuple[int, ...]], count: int) -> tuple[int, ...]:
    """``count`` integers that rank 0 of a CPU process group measures, on every rank.

    What is measured differs from rank to rank, and decisions must not. Every rank must call it.
    """
    if group is None or torch.distributed.get_world_size(group) == 1:
        return measure()
    tensor = torch.zeros(count, dtype=torch.int64)
    if torch.distributed.get_rank(group) == 0:
        tensor = torch.tensor(measure(), dtype=torch.int64)
    torch.distributed.broadcast(tensor, group=group, group_src=0)
    return tuple(tensor.tolist())
