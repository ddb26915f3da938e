"""Views of encoded blocks on their way back to slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_plt.blocks import Block, BlockReference, BlockState, View
from sglang_plt.node import Node


def joined(nodes: list[Node]) -> list[tuple[int, View]]:
    """The views of a run of nodes, each with the number of the node that it begins in; those that splits cut as one."""
    found: list[tuple[int, View]] = []
    for index, node in enumerate(nodes):
        for view in node.views:
            begin, last = found[-1] if found else (index, None)
            if last is not None and last.block is view.block and last.stop == view.start:
                found[-1] = begin, View(view.block, last.start, view.stop)
            else:
                found.append((index, view))
    return found


def decode_view(decode: Callable[..., None], view: View, slots: Any, position: int) -> None:
    """Rebuild the rows of ``view``; ``position`` is that of row 0 of its block."""
    block = view.block
    if block.state is not BlockState.READY:
        raise ValueError("the block was never encoded")
    given: dict[str, Any] = {}
    if block.references:
        given["references"] = [reference.block.data for reference in ready(block)]
    if block.tokens is not None:
        given["tokens"] = block.tokens
    decode(block.data, view.start, view.stop, slots, position, **given)


def ready(block: Block) -> list[BlockReference]:
    """What ``block`` is coded as differences from: the same before it is encoded and ever after."""
    return [reference for reference in block.references if reference.block.state is BlockState.READY]
