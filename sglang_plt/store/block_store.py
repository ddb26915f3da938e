"""The byte budget of the cold tier and the life of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_plt.blocks import Block, BlockReference, View


class BlockStore:
    """Accounts for blocks in integer bytes that every rank computes alike; it never chooses what to drop.

    Args:
        budget_bytes: most bytes that blocks may hold together.
        on_unviewed: told about every block when the last view of it goes; other blocks may need its bytes still.

    Attributes:
        num_dependants: blocks that are coded as differences from others.
        num_orphans: blocks without a view, which others need.
    """

    def __init__(self, budget_bytes: int, on_unviewed: Callable[[Block], None] = lambda block: None):
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_blocks = 0
        self.num_dependants = 0
        self.num_orphans = 0
        self._on_unviewed = on_unviewed
        self._next_id = 0

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def add(
        self,
        num_rows: int,
        num_bytes: int,
        position: int,
        slots: Any,
        teaches: bool = False,
        references: Sequence[BlockReference] = (),
        tokens: Any = None,
    ) -> View:
        """Charge one block to the budget and return the view of all its rows.

        Args:
            slots: where its rows are until the writer has read them.
            teaches, tokens: see :class:`Block`.
            references: likewise; :meth:`hold` has been called for them.

        Raises:
            MemoryError: it does not fit; make room first.
        """
        if num_bytes > self.free_bytes:
            raise MemoryError(f"a block of {num_bytes} bytes does not fit into {self.free_bytes} free bytes")
        self._next_id += 1
        block = Block(self._next_id, num_rows, num_bytes, position, refs=1, slots=slots, teaches=teaches)
        block.references, block.tokens = tuple(references), tokens
        self.num_dependants += bool(references)
        self.used_bytes += num_bytes
        self.num_blocks += 1
        return View(block, 0, num_rows)

    def settle(self, block: Block, num_bytes: int) -> None:
        """Charge what a block turned out to need; the store may be over its budget afterwards."""
        self.used_bytes += num_bytes - block.num_bytes
        block.num_bytes = num_bytes
        block.settled = True

    def hold(self, references: Iterable[BlockReference]) -> None:
        """Keep the bytes of blocks for one that is coded as differences from them."""
        for reference in references:
            reference.block.dependants += 1

    def let_go(self, references: Iterable[BlockReference]) -> int:
        """Undo :meth:`hold`; returns the bytes of the blocks that nobody needs any more."""
        freed = 0
        for reference in references:
            block = reference.block
            assert block.dependants > 0, f"block {block.id} was let go twice"
            block.dependants -= 1
            if not block.refs and not block.dependants:
                self.num_orphans -= 1
            freed += self._drop(block)
        return freed

    def release(self, views: Iterable[View]) -> int:
        """Give up views; returns the bytes of the blocks that nobody needs any more."""
        freed = 0
        for view in views:
            block = view.block
            assert block.refs > 0, f"block {block.id} was released twice"
            block.refs -= 1
            if block.refs == 0:
                self._on_unviewed(block)
                self.num_orphans += bool(block.dependants)
                freed += self._drop(block)
        return freed

    def _drop(self, block: Block) -> int:
        if block.refs or block.dependants:
            return 0
        block.data = None
        self.num_blocks -= 1
        self.used_bytes -= block.num_bytes
        self.num_dependants -= bool(block.references)
        references, block.references = block.references, ()
        return block.num_bytes + self.let_go(references)
