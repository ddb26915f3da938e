"""Rows of other blocks that a block's rows are coded as differences from, and how a payload names them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_REFERENCES = 8
"""Most reference blocks of one block."""
MAX_STRETCHES = 64
"""Most stretches of one block, over all its references."""

_HEAD = struct.Struct("<BB")
_CHECKSUM: np.dtype = np.dtype("<u8")


class BlockDamaged(ValueError):
    """These bytes are not a block that may be decoded here; the message begins with the field at fault."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows ``row .. row + length`` of a block resemble rows ``reference .. reference + length`` of its reference."""

    reference: int
    row: int
    length: int


@dataclass(frozen=True)
class Reference:
    """A whole encoded block, header included, and the stretches that resemble it."""

    block: np.ndarray
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class OpenReference:
    """A reference block whose header and checksum were found good.

    Attributes:
        checksum: of its header.
        payload: uint8.
        num_rows, num_exact: of its header.
        stretches: empty when decoding, where the payload names them.
    """

    checksum: int
    payload: np.ndarray
    num_rows: int
    num_exact: int
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Where every row of a block finds its reference.

    Attributes:
        checksums: uint64 ``[references]``, those of the reference blocks' headers.
        block: int16 ``[rows]``, number of the reference; -1 where there is none.
        row: int16 ``[rows]``, row of that reference.
    """

    checksums: np.ndarray
    block: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, checksums: Sequence[int], stretches: Sequence[Sequence[Stretch]], num_rows: int) -> Sources:
        """From the stretches of every reference; the first to name a row has it.

        Raises:
            ValueError: a stretch leaves the block, or 256 rows.
        """
        block: np.ndarray = np.full(num_rows, -1, np.int16)
        row: np.ndarray = np.zeros(num_rows, np.int16)
        for number, of_reference in enumerate(stretches):
            for stretch in of_reference:
                rows = np.arange(stretch.row, stretch.row + stretch.length)
                last = stretch.reference + stretch.length
                if not len(rows) or rows[0] < 0 or rows[-1] >= num_rows or stretch.reference < 0 or last > 256:
                    raise ValueError(f"codec: a block of {num_rows} rows has no {stretch}")
                free = rows[block[rows] < 0]
                block[free], row[free] = number, free + (stretch.reference - stretch.row)
        return cls(np.array(checksums, _CHECKSUM), block, row)

    @classmethod
    def fit(
        cls, references: Sequence[OpenReference], escaped: Sequence[np.ndarray], num_exact: int, num_rows: int
    ) -> Sources | None:
        """What of the stretches of ``references`` serves coded rows; None where nothing does.

        Args:
            escaped: of every reference, its coded rows without codes.
            num_exact, num_rows: rows at the front that are not coded, and rows that are, of the block.
        """
        found = cls.of([reference.checksum for reference in references], [()] * len(references), num_rows)
        for number, (reference, bad) in enumerate(zip(references, escaped, strict=True)):
            if len(np.unique(found.block[found.block >= 0])) == MAX_REFERENCES:
                break
            for stretch in reference.stretches:
                rows: np.ndarray = np.arange(stretch.row, stretch.row + stretch.length) - num_exact
                there: np.ndarray = rows + (num_exact - stretch.row + stretch.reference - reference.num_exact)
                good = (rows >= 0) & (rows < num_rows) & (there >= 0)
                good &= (there < reference.num_rows - reference.num_exact) & ~np.isin(there, bad)
                rows, there = rows[good], there[good]
                free = found.block[rows] < 0
                found.block[rows[free]], found.row[rows[free]] = number, there[free]
        stretches = found.stretches()
        for _, _, row, length in sorted(stretches, key=lambda stretch: stretch[3])[: -MAX_STRETCHES or None]:
            found.block[row : row + length] = -1
        return found if (found.block >= 0).any() else None

    def check(self, num_rows: Sequence[int]) -> None:
        """Refuse rows that reference blocks of so many coded rows do not have.

        Raises:
            BlockDamaged: see above.
        """
        for number, count in enumerate(num_rows):
            if (self.row[self.block == number] >= count).any():
                raise BlockDamaged(f"payload: a stretch leaves the {count} rows of reference {number}")

    @property
    def rows(self) -> np.ndarray:
        """int64, ascending: the rows that have a reference."""
        return np.flatnonzero(self.block >= 0)

    def without(self, rows: np.ndarray) -> Sources:
        """The same, but that some rows have none."""
        block = self.block.copy()
        block[rows] = -1
        return Sources(self.checksums, block, self.row)

    def pack(self) -> bytes:
        """Bytes that :meth:`unpack` reads; what does not fit :data:`MAX_STRETCHES` must have been left out."""
        used = np.unique(self.block[self.block >= 0])
        stretches = self.stretches()
        number = {int(old): new for new, old in enumerate(used)}
        entries = [(number[block], first, row, length - 1) for block, first, row, length in stretches]
        return b"".join(
            (
                _HEAD.pack(len(used), len(entries)),
                self.checksums[used].tobytes(),
                np.array(entries, np.uint8).tobytes(),
            )
        )

    def stretches(self) -> list[tuple[int, int, int, int]]:
        """``(reference, row of the reference, row, length)``, in the order of rows."""
        found = []
        rows = self.rows
        if not len(rows):
            return []
        shift = self.row.astype(np.int64) - np.arange(len(self.row))
        breaks = (np.diff(rows) != 1) | (np.diff(shift[rows]) != 0) | (np.diff(self.block[rows]) != 0)
        for part in np.split(rows, np.flatnonzero(breaks) + 1):
            found.append((int(self.block[part[0]]), int(self.row[part[0]]), int(part[0]), len(part)))
        return found

    @staticmethod
    def unpack(data: memoryview, num_rows: int) -> tuple[Sources, int]:
        """Inverse of :meth:`pack`, and how many bytes it took.

        Raises:
            ValueError: ``data`` is not that.
        """
        references, stretches = _HEAD.unpack_from(data)
        if not (0 < references <= MAX_REFERENCES and 0 < stretches <= MAX_STRETCHES):
            raise ValueError(f"codec: {references} references and {stretches} stretches")
        checksums = np.frombuffer(data, _CHECKSUM, references, _HEAD.size)
        entries = np.frombuffer(data, np.uint8, 4 * stretches, _HEAD.size + 8 * references).reshape(-1, 4).tolist()
        of: list[list[Stretch]] = [[] for _ in range(references)]
        total = 0
        for number, first, row, length in entries:
            if number >= references:
                raise ValueError(f"codec: a stretch of reference {number}, there are {references}")
            of[number].append(Stretch(first, row, length + 1))
            total += length + 1
        sources = Sources.of(checksums.tolist(), of, num_rows)
        if len(sources.rows) != total:
            raise ValueError(f"codec: stretches of {total} rows share some, {len(sources.rows)} are theirs")
        return sources, _HEAD.size + 8 * references + 4 * stretches
