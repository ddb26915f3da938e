"""Differences from reference rows: quantised with a dead zone, coded sparsely, in groups of rows of like energy.

A reference's error is noise as large as the step; rounding would code it once more for every row that refers to it, a
dead zone does not. Rows behind a difference of the texts drift apart there and come together again, so the rows of a
block are coded in up to three groups by how much of them differs, each with scales of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from sglang_plt.codec import entropy
from sglang_plt.codec.packing import LARGEST, Packing
from sglang_plt.codec.reference import Sources

DEAD_ZONE = 0.85
"""Differences below it, in steps, are coded as none; those up to a step larger as one, and so on."""
QUIET = 0.8
"""Root mean square, in steps, of a row's differences in one unit; below it they are the error of the reference."""
GROUPS = 3
_THRESHOLDS = (2.0, 6.0)  # times the median of a row's codes that are not zero


class Referred(Protocol):
    """What is read of a reference block: its codes, and the steps of the profile in a step of its."""

    @property
    def own(self) -> list[Any]: ...

    @property
    def scale(self) -> float: ...


class Differences:
    """Codes the rows of one block that have a reference, unit by unit.

    Args:
        sources: of the block's rows.
        opened: the reference blocks that it numbers.
        packing: theirs.
        widths: components of every unit.
        scale: steps of the profile in a step.

    Attributes:
        own: int64 numbers of the rows that have none.
        rows: int64 numbers of those that do.
        codes: int16 ``[components, rows]`` of the units so far, components padded to a multiple of 16.
    """

    def __init__(
        self, sources: Sources, opened: Sequence[Referred], packing: Packing, widths: Sequence[int], scale: float
    ) -> None:
        self.sources, self.scale = sources, scale
        self.rows = torch.from_numpy(sources.rows)
        self.own = torch.from_numpy(np.flatnonzero(sources.block < 0))
        self.codes: list[np.ndarray] = []
        self._opened, self._packing, self._widths = opened, packing, widths
        self._direct, self._near = RowBits(len(self.rows)), RowBits(len(self.rows))

    def quantise(self, number: int, components: torch.Tensor, escaped: torch.Tensor) -> torch.Tensor:
        """What the decoder will have of ``components``, float32 ``[rows, width]``, in steps, as those are.

        Args:
            escaped: bool ``[all rows]``, rows whose codes do not matter; those too far from their reference are added.
        """
        reference = self._reference(number, components.device)
        step = self._packing.difference_step
        codes = quantise((components - reference) / step, self._packing.quiet_zone)
        escaped[self.rows] |= ~(codes.abs().amax(1) <= LARGEST)
        codes[escaped[self.rows]] = 0
        self._direct.add(components.round())
        self._near.add(codes)
        self.codes.append(entropy.pad_to_bands(codes.T.to(torch.int16).cpu().numpy()))
        return reference + step * codes

    def _reference(self, number: int, device: torch.device) -> torch.Tensor:
        """The references' components in steps, float32 ``[rows, width]``."""
        width, stretches = self._widths[number], self.sources.stretches()
        found = torch.zeros(width, len(self.rows), device=device)
        for index, of in enumerate(self._opened):
            mine = [stretch for stretch in stretches if stretch[0] == index]
            if not mine:
                continue
            least, most = min(stretch[1] for stretch in mine), max(stretch[1] + stretch[3] for stretch in mine)
            kept, used = self._packing.dequantise(of.own[number], least, most, device)
            if width % entropy.BAND:
                kept, used = kept[:, used < width], used[used < width]
            for _, begin, row, length in mine:
                at = int(np.searchsorted(self.sources.rows, row))
                part = kept[begin - least : begin - least + length].T
                found[:, at : at + length].index_add_(0, used, part, alpha=of.scale / self.scale)
        return found.T

    def dear_rows(self) -> np.ndarray:
        """Rows of stretches that would take fewer bits without their reference; ask when all units are coded."""
        gain = np.zeros(len(self.sources.block))
        gain[self.sources.rows] = self._direct.bits - self._near.bits
        dear = [
            np.arange(row, row + length)
            for _, _, row, length in self.sources.stretches()
            if gain[row : row + length].sum() <= 0
        ]
        return np.concatenate(dear) if dear else np.empty(0, np.int64)

    def without(self, rows: np.ndarray) -> Differences | None:
        """To begin again, some rows without their reference; None where no row is left with one."""
        sources = self.sources.without(rows)
        if not len(sources.rows):
            return None
        return Differences(sources, self._opened, self._packing, self._widths, self.scale)


def quantise(difference: torch.Tensor, quiet_zone: float) -> torch.Tensor:
    """Whole steps, as float32, of a ``difference`` in steps ``[rows, n]``: 0 below the dead zone, then one a step.

    The dead zone of a row is :data:`DEAD_ZONE`, or ``quiet_zone`` where the row hardly differs.
    """
    quiet = difference.pow(2).mean(1, keepdim=True) < QUIET**2
    dead_zone = torch.where(quiet, quiet_zone, DEAD_ZONE)
    return difference.sign() * (difference.abs() + (1 - dead_zone)).floor().clamp_min(0)


class RowBits:
    """About how many bits rows take: the entropy of where codes are not zero, a sign and the digits of each."""

    def __init__(self, num_rows: int) -> None:
        self._nonzero = torch.zeros(num_rows)
        self._digits = torch.zeros(num_rows)
        self._components = 0

    def add(self, codes: torch.Tensor) -> None:
        """Whole steps as float32 ``[rows, components]``, of one unit."""
        magnitudes = codes.abs()
        self._nonzero += (magnitudes > 0).sum(1).cpu()
        self._digits += magnitudes.clamp_min(1).log2().sum(1).cpu()
        self._components += codes.shape[1]

    @property
    def bits(self) -> np.ndarray:
        """float64 ``[rows]``, of all units."""
        share = (self._nonzero.double() / max(1, self._components)).clamp(1e-9, 1 - 1e-9)
        where = -share * share.log2() - (1 - share) * (1 - share).log2()
        found: np.ndarray = (self._components * where + self._nonzero + 1.5 * self._digits).numpy()
        return found


def pack(codes: Sequence[np.ndarray]) -> bytes:
    """The bytes of all units' differences, int16 ``[components, rows]`` each, components a multiple of 16."""
    whole = np.concatenate(codes)
    rows = whole.shape[1]
    counts = np.count_nonzero(whole, axis=0)
    groups: np.ndarray = np.digitize(counts, np.array(_THRESHOLDS) * max(1.0, float(np.median(counts)))).astype(
        np.uint8
    )
    choices = [np.zeros(rows, np.uint8)]
    if groups.any():
        choices.append(groups)
    packed = [_pack_groups(whole, choice) for choice in choices]
    return min(packed, key=len)


def _pack_groups(whole: np.ndarray, groups: np.ndarray) -> bytes:
    parts = [bytes([int(groups.any())]), np.packbits(_bits(groups)).tobytes() if groups.any() else b""]
    for group in range(int(groups.max()) + 1):
        rows = np.ascontiguousarray(whole[:, groups == group])
        coded = entropy.encode_numbers(rows) if rows.shape[1] else b""
        parts += [len(coded).to_bytes(4, "little"), coded]
    return b"".join(parts)


def _bits(groups: np.ndarray) -> np.ndarray:
    return np.unpackbits(groups[:, None], axis=1, bitorder="little")[:, :2]


def unpack(data: memoryview, widths: Sequence[int], rows: int) -> tuple[list[np.ndarray], int]:
    """Inverse of :func:`pack`, units of ``widths`` components without padding, and how many bytes it took.

    Raises:
        ValueError: ``data`` is not that.
    """
    padded = [-(-width // entropy.BAND) * entropy.BAND for width in widths]
    groups: np.ndarray = np.zeros(rows, np.uint8)
    at = 1
    if data[0]:
        size = -(-2 * rows // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, size, at))[: 2 * rows].reshape(rows, 2)
        groups = bits[:, 0] | bits[:, 1] << 1
        if groups.max(initial=0) >= GROUPS:
            raise ValueError(f"delta: a row of group {groups.max()}, there are {GROUPS}")
        at += size
    whole: np.ndarray = np.zeros((sum(padded), rows), np.int16)
    for group in range(int(groups.max(initial=0)) + 1):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4
        where = groups == group
        if size:
            whole[:, where] = entropy.decode_numbers(data[at : at + size], len(whole), int(np.count_nonzero(where)))
        elif where.any():
            raise ValueError(f"delta: group {group} has rows and no codes")
        at += size
    ends = np.cumsum(padded)
    return [whole[end - size : end - size + width] for end, size, width in zip(ends, padded, widths, strict=True)], at
