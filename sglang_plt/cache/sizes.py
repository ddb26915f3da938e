"""What a block will take of the budget, before it is encoded."""

from __future__ import annotations

from typing import Protocol

from sglang_plt.blocks import BLOCK_TOKENS

_WEIGHT = 16  # blocks that a mean remembers
_NEAR_SHARE = 8  # of a row without a reference, until one was seen
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
        self._near_bytes = self._row_bytes // _NEAR_SHARE

    @property
    def of_row(self) -> int:
        """Bytes of a row, at least 1."""
        return max(1, self._row_bytes)

    def __call__(self, num_rows: int, position: int, num_near: int = 0) -> int:
        """Bytes to reserve for a block, ``num_near`` rows of which have a reference."""
        assert self._codec is not None
        most = self._codec.num_bytes(num_rows, position)
        return most if self.exact else min(most, (num_rows - num_near) * self.of_row + num_near * self._near_bytes)

    def learn(self, num_rows: int, num_bytes: int, num_near: int = 0) -> int:
        """A block has been settled; returns the bytes that its references saved."""
        if self.exact or num_rows < BLOCK_TOKENS // 4:
            return 0
        if not num_near:
            self._row_bytes += (num_bytes // num_rows - self._row_bytes) // _WEIGHT
            return 0
        near = max(0, num_bytes - (num_rows - num_near) * self.of_row)
        self._near_bytes += (near // num_near - self._near_bytes) // _WEIGHT
        return max(0, num_near * self.of_row - near)
