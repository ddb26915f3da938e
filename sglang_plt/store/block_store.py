"""The byte budget of the cold tier and the life of its blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_plt.blocks import Block, View


class BlockStore:
    """Accounts for blocks in integer bytes that every rank computes alike; it never chooses what to drop.

    Args:
        budget_bytes: most bytes that blocks may hold together.
    """

    def __init__(self, budget_bytes: int):
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_blocks = 0
        self._next_id = 0

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def add(self, num_rows: int, num_bytes: int, position: int, slots: Any, teaches: bool = False) -> View:
        """Charge one block to the budget and return the view of all its rows.

        Args:
            slots: where its rows are until the writer has read them.
            teaches: see :class:`Block`.

        Raises:
            MemoryError: it does not fit; make room first.
        """
        if num_bytes > self.free_bytes:
            raise MemoryError(f"a block of {num_bytes} bytes does not fit into {self.free_bytes} free bytes")
        self._next_id += 1
        block = Block(self._next_id, num_rows, num_bytes, position, refs=1, slots=slots, teaches=teaches)
        self.used_bytes += num_bytes
        self.num_blocks += 1
        return View(block, 0, num_rows)

    def settle(self, block: Block, num_bytes: int) -> None:
        """Charge what a block turned out to need; the store may be over its budget afterwards."""
        self.used_bytes += num_bytes - block.num_bytes
        block.num_bytes = num_bytes
        block.settled = True

    def release(self, views: Iterable[View]) -> int:
        """Give up views; returns the bytes of the blocks that nobody needs any more."""
        freed = 0
        for view in views:
            block = view.block
            assert block.refs > 0, f"block {block.id} was released twice"
            block.refs -= 1
            if block.refs == 0:
                block.data = None
                freed += block.num_bytes
                self.num_blocks -= 1
        self.used_bytes -= freed
        return freed
