"""Encoded blocks as the trie sees them: immutable, reference-counted, addressed through views.

A node holds views ``(block, start, stop)``; splitting a node edits its list of views and never the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

BLOCK_TOKENS = 256
"""Most rows of one block."""


class BlockState(Enum):
    """Where the bytes of a block are."""

    QUEUED = "queued"  # reserved; the writer has not encoded it yet
    ENCODING = "encoding"
    READY = "ready"
    FAILED = "failed"  # encoding failed on this rank: a miss when it is asked for


@dataclass(frozen=True, slots=True)
class BlockReference:
    """A block that another one is coded as differences from.

    Attributes:
        block: has no references itself.
        stretches: ``(row of the reference, row, rows)`` that resemble each other.
    """

    block: Block
    stretches: tuple[tuple[int, int, int], ...]

    @property
    def num_rows(self) -> int:
        """Rows that resemble rows of the reference."""
        return sum(length for _, _, length in self.stretches)


@dataclass(eq=False, slots=True)
class Block:
    """At most ``BLOCK_TOKENS`` consecutive rows of one sequence, encoded once.

    Attributes:
        id: unique within one store.
        num_rows: rows (tokens) of the block.
        num_bytes: bytes charged to the budget, the same on every rank: an estimate until ``settled``.
        position: absolute token position of row 0.
        refs: views that need the block; at zero nothing new may refer to it.
        dependants: blocks that are coded as differences from it; its bytes stay until these are gone, too.
        data: the encoded bytes when ``state`` is READY.
        settled: whether ``num_bytes`` is final.
        teaches: whether its rows may go into what is learned from rows.
        references: blocks that its rows resemble; held until its own bytes are released.
        tokens: ids of its rows, where they are coded with their help; a view of the array of a node's key.
    """

    id: int
    num_rows: int
    num_bytes: int
    position: int
    state: BlockState = BlockState.QUEUED
    refs: int = 0
    dependants: int = 0
    data: Any = None
    slots: Any = field(default=None, repr=False)  # rows still to be read, while QUEUED
    settled: bool = False
    teaches: bool = False
    references: tuple[BlockReference, ...] = ()
    tokens: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class View:
    """Rows ``[start, stop)`` of a block."""

    block: Block
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def split_views(views: Iterable[View], length: int) -> tuple[list[View], list[View]]:
    """Cut a list of views after ``length`` rows; a block that straddles the cut gains one reference."""
    left: list[View] = []
    right: list[View] = []
    remaining = length
    for view in views:
        if remaining >= len(view):
            left.append(view)
        elif remaining <= 0:
            right.append(view)
        else:
            middle = view.start + remaining
            left.append(View(view.block, view.start, middle))
            right.append(View(view.block, middle, view.stop))
            view.block.refs += 1
        remaining -= len(view)
    return left, right
