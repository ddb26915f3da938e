"""How the components of a transform become bytes: ``entropy`` for the fewest, ``fixed`` width for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_plt.codec import entropy
from triton_ops.band_codes import BAND, MAX_WIDTH, Bands, packed_bytes
from triton_ops.band_codes.cpu_decode import decode as decode_bands
from triton_ops.band_codes.cpu_encode import encode as encode_bands

LARGEST = float(entropy.LARGEST)
"""Components must not be larger, in steps."""
_NO_OUTLIER = 65535  # a gap that only moves on
_COUNT: np.dtype = np.dtype("<u4")
_GAP: np.dtype = np.dtype("<u2")
_VALUE: np.dtype = np.dtype("<f2")


class Packing(ABC):
    """Quantises components, in units of the step, and packs what it stored of them.

    Attributes:
        quiet_zone: where a row is as good as its reference, which is coded this way, differences below so many steps
            are the error of the reference.
        difference_step: step of such differences, in steps.
    """

    name: str
    quiet_zone: float
    difference_step: float

    def fits(self, components: torch.Tensor) -> torch.Tensor:
        """Which rows of ``[rows, n]`` it can code, bool ``[rows]``; False for NaN."""
        return components.abs().amax(1) <= LARGEST

    @abstractmethod
    def quantise(self, components: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """``(stored, what the decoder will have)`` of a unit's components, float32 ``[rows, n]``, of rows that fit."""

    @abstractmethod
    def pack(self, stored: Sequence[Any]) -> bytes:
        """The bytes of all units of a block."""

    @abstractmethod
    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[Any]:
        """Inverse of :meth:`pack`, for units of ``widths`` components.

        Raises:
            ValueError: ``data`` does not hold that.
        """

    @abstractmethod
    def warm_up(self) -> None:
        """Compile and compute what the first block would wait for."""

    @abstractmethod
    def dequantise(self, stored: Any, start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``start .. stop`` of the components that are not zero throughout: values and which they are.

        Returns:
            float32 ``[stop - start, k]``, and int64 ``[k]`` numbers of components, both on ``device``.
        """


class Entropy(Packing):
    """Trellis-coded, see :mod:`triton_ops.trellis`. Stored: :class:`entropy.HalfSteps`, padded to bands.

    A trellis takes a step 1.24 times that of rounding for the same error; differences are rounded.
    """

    name = "entropy"
    quiet_zone = 0.95
    difference_step = 0.8

    def quantise(self, components: torch.Tensor) -> tuple[entropy.HalfSteps, torch.Tensor]:
        values = components.T.cpu().numpy()
        unit = entropy.quantise_unit(np.ascontiguousarray(entropy.pad_to_bands(values), np.float32))
        kept = torch.from_numpy(unit.codes[: len(values)]).to(components.device).T.float() * 0.5
        return unit, kept

    def pack(self, stored: Sequence[entropy.HalfSteps]) -> bytes:
        return entropy.encode_units(stored)

    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[entropy.HalfSteps]:
        padded = [-(-width // entropy.BAND) * entropy.BAND for width in widths]
        units = entropy.decode_units(data, padded, rows)
        return [entropy.HalfSteps(unit.codes[:width]) for unit, width in zip(units, widths, strict=True)]

    def dequantise(
        self, stored: entropy.HalfSteps, start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes = stored.codes[:, start:stop]
        used = np.flatnonzero(codes.any(axis=1))
        return torch.from_numpy(codes[used]).to(device).float().T * 0.5, torch.from_numpy(used).to(device)

    def warm_up(self) -> None:
        entropy.warm_up()


class Fixed(Packing):
    """Fixed-width codes a band of 16 components, see :mod:`triton_ops.band_codes`. Stored: :class:`Bands`."""

    name = "fixed"
    quiet_zone = 1.4  # levels of a band may lie further apart than a step
    difference_step = 1.0

    def quantise(self, components: torch.Tensor) -> tuple[Bands, torch.Tensor]:
        values = components.cpu().numpy()
        width = values.shape[1]
        if width % BAND:
            values = np.pad(values, ((0, 0), (0, -width % BAND)))
        bands, kept = encode_bands(np.ascontiguousarray(values))
        return bands, torch.from_numpy(kept[:, :width]).to(components.device)

    def pack(self, stored: Sequence[Bands]) -> bytes:
        band_values, first = stored[0].rows * BAND, 0
        parts: list[np.ndarray] = []
        for bands in stored:
            parts.append(bands.where + first * band_values)
            first += len(bands.widths)
        gaps, values = _gaps(np.concatenate(parts), np.concatenate([bands.values for bands in stored]))
        return b"".join(
            (
                np.array([len(gaps)], _COUNT).tobytes(),
                *(bands.widths.tobytes() for bands in stored),
                *(bands.scales.tobytes() for bands in stored),
                gaps.tobytes(),
                values.tobytes(),
                *(bands.packed.tobytes() for bands in stored),
            )
        )

    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[Bands]:
        numbers = [-(-width // BAND) for width in widths]
        total = sum(numbers)
        count = int(np.frombuffer(data, _COUNT, 1)[0])
        bits = np.frombuffer(data, np.uint8, total, 4)
        scales = np.frombuffer(data, np.uint8, total, 4 + total)
        at = 4 + 2 * total
        gaps, values = np.frombuffer(data, _GAP, count, at), np.frombuffer(data, _VALUE, count, at + 2 * count)
        packed = np.frombuffer(data, np.uint8, offset=at + 4 * count)
        if len(packed) != packed_bytes(bits, rows) or bits.max(initial=0) > MAX_WIDTH:
            raise ValueError(f"fixed: {len(packed)} bytes of codes, the widths say {packed_bytes(bits, rows)}")
        where, values = _positions(gaps, values)
        if where.size and where[-1] >= total * rows * BAND:
            raise ValueError(f"fixed: an outlier at {where[-1]}, there are {total * rows * BAND} components")
        found, first, begin = [], 0, 0
        for number in numbers:
            end = begin + packed_bytes(bits[first : first + number], rows)
            part, least = slice(first, first + number), first * rows * BAND
            low = int(np.searchsorted(where, least))
            high = int(np.searchsorted(where, least + number * rows * BAND))
            inside: np.ndarray = where[low:high] - least
            found.append(Bands(rows, bits[part], scales[part], packed[begin:end], inside, values[low:high]))
            first, begin = first + number, end
        return found

    def dequantise(
        self, stored: Bands, start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        used = stored.widths > 0
        used[stored.where // (stored.rows * BAND)] = True
        values = decode_bands(stored, start, stop, np.flatnonzero(used))
        return torch.from_numpy(values).to(device), torch.from_numpy(np.flatnonzero(used.repeat(BAND))).to(device)

    def warm_up(self) -> None:
        stored, _ = self.quantise(torch.ones(2, BAND))
        self.dequantise(stored, 0, 2, torch.device("cpu"))


def _gaps(where: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions as distances, long ones in several steps."""
    distances = np.diff(where, prepend=-1) - 1
    more, last = np.divmod(distances, _NO_OUTLIER)
    ends = np.cumsum(more + 1) - 1
    gaps: np.ndarray = np.full(len(where) + int(more.sum()), _NO_OUTLIER, _GAP)
    kept = np.zeros(len(gaps), _VALUE)
    gaps[ends], kept[ends] = last, values
    return gaps, kept


def _positions(gaps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of :func:`_gaps`."""
    real = gaps != _NO_OUTLIER
    steps = gaps.astype(np.int64) + real
    return np.cumsum(steps)[real] - 1, values[real]
