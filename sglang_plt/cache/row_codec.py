"""What a cold tier encodes and decodes rows with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class RowCodec(Protocol):
    """What the tier asks of a codec over one KV pool."""

    lossless: bool

    @property
    def fixed_size(self) -> bool:
        """True when :meth:`num_bytes` is exact."""

    def num_bytes(self, num_rows: int, position: int) -> int:
        """Most bytes of the block, from integers alone."""

    @property
    def takes_references(self) -> bool:
        """True when rows can be coded as differences from those of other blocks."""

    @property
    def takes_tokens(self) -> bool:
        """True when rows are, or will be, coded with the help of their tokens."""

    def encode(self, slots: Any, position: int, teaches: bool = False, references: Any = (), tokens: Any = None) -> Any:
        """Encode the rows of ``slots``; ``position`` is the sequence position of the first.

        ``teaches``: what is learned from rows may learn from these. ``references``: encoded blocks, each with its
        stretches, see :class:`sglang_plt.blocks.BlockReference`; only where :attr:`takes_references`. ``tokens``: ids
        of the rows, only where :attr:`takes_tokens`.
        """

    def advance(self, agree_min: Callable[[int], int]) -> bool:
        """Change to what was learned meanwhile, on all ranks at once; called at the same steps on every rank."""

    def decode(
        self,
        data: Any,
        start: int,
        stop: int,
        slots: Any,
        position: int,
        references: Any = (),
        tokens: Any = None,
    ) -> None:
        """Rebuild rows ``[start, stop)`` into ``slots``; ``position`` is that of row 0. Raises before it writes.

        ``references``, ``tokens``: the blocks and the tokens of all its rows that it was encoded with.
        """
