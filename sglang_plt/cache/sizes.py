"""What a block will take of the budget, before it is encoded."""

from __future__ import annotations

from typing import Protocol

from sglang_plt.blocks import BLOCK_TOKENS

_WEIGHT = 16  # blocks that a mean remembers
_EXPECTED_SHARE = 2  # of the most that a block may take, until one was seen


class _Codec(Protocol):
    @property
    def fixed_size(self) -> bool: ...

    def num_bytes(self, num_rows: int, position: int) -> int: ...


class BlockSizes:
    """Estimates from sizes that all ranks agreed on, in integers, so that all ranks reserve alike.

    Args:
        codec: of the blocks to come; None where there will be none.
    """

    def __init__(self, codec: _Codec | None):
        self._codec = codec
        self.exact = codec is None or codec.fixed_size
        self._row_bytes = codec.num_bytes(BLOCK_TOKENS, BLOCK_TOKENS) // BLOCK_TOKENS + 1 if codec is not None else 1
        if not self.exact:
            self._row_bytes //= _EXPECTED_SHARE

    @property
    def of_row(self) -> int:
        """Bytes of a row, at least 1."""
        return max(1, self._row_bytes)

    def __call__(self, num_rows: int, position: int) -> int:
        """Bytes to reserve for a block."""
        assert self._codec is not None
        most = self._codec.num_bytes(num_rows, position)
        return most if self.exact else min(most, num_rows * self.of_row)

    def learn(self, num_rows: int, num_bytes: int) -> None:
        """A block has been settled."""
        if not self.exact and num_rows >= BLOCK_TOKENS // 4:
            self._row_bytes += (num_bytes // num_rows - self._row_bytes) // _WEIGHT
