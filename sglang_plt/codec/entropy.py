"""Entropy coding of components: :mod:`triton_ops.trellis` in the terms of the packings.

Two kinds of codes: a unit's components, trellis-coded in half steps, and whole numbers, as differences from references
are, which have a dead zone instead. FORMAT.md is normative for the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from triton_ops.trellis.cpu_decode import decode
from triton_ops.trellis.cpu_encode import choose_classes, encode
from triton_ops.trellis.cpu_quantise import quantise
from triton_ops.trellis.tables import BAND, LARGEST

__all__ = [
    "BAND",
    "LARGEST",
    "HalfSteps",
    "decode_numbers",
    "decode_units",
    "encode_numbers",
    "encode_units",
    "pad_to_bands",
    "quantise_unit",
]


@dataclass(frozen=True)
class HalfSteps:
    """Components of one unit as its rows have them.

    Attributes:
        codes: int16 ``[components, rows]`` in half steps.
        classes: uint8 ``[components / 16]``, of the bands; None where they were decoded.
    """

    codes: np.ndarray
    classes: np.ndarray | None = None


def pad_to_bands(components: np.ndarray) -> np.ndarray:
    """``[components, rows]`` with rows of zeros behind, up to a multiple of 16."""
    short = -len(components) % BAND
    return np.pad(components, ((0, short), (0, 0))) if short else components


def quantise_unit(components: np.ndarray) -> HalfSteps:
    """Components in steps, float32 ``[components, rows]``, C-contiguous, components a multiple of 16."""
    classes = choose_classes(np.rint(components).astype(np.int16))
    return HalfSteps(quantise(components, classes), classes)


def encode_units(units: Sequence[HalfSteps]) -> bytes:
    """The bytes of all units of a block, as :func:`quantise_unit` gives them; at least one row."""
    classes = [unit.classes for unit in units if unit.classes is not None]
    starts = _starts([len(found) for found in classes])
    return encode(np.concatenate([unit.codes for unit in units]), np.concatenate(classes), starts, trellis=True)


def decode_units(data: bytes | memoryview, widths: Sequence[int], rows: int) -> list[HalfSteps]:
    """Units of ``widths`` components, each a multiple of 16.

    Raises:
        ValueError: ``data`` is not what :func:`encode_units` makes of such units.
    """
    codes = decode(data, _starts([width // BAND for width in widths]), rows, trellis=True)
    return [HalfSteps(part) for part in np.split(codes, np.cumsum(widths)[:-1])]


def encode_numbers(codes: np.ndarray) -> bytes:
    """Whole numbers within ``LARGEST``, int16 ``[components, rows]``, components a multiple of 16, at least one row."""
    classes = choose_classes(codes)
    return encode(2 * codes, classes, _starts([len(classes)]), trellis=False)


def decode_numbers(data: bytes | memoryview, components: int, rows: int) -> np.ndarray:
    """Inverse of :func:`encode_numbers`.

    Raises:
        ValueError: ``data`` is not that.
    """
    return decode(data, _starts([components // BAND]), rows, trellis=False) >> 1


def warm_up() -> None:
    """Compile the coders and compute their tables, which the first block would wait for otherwise."""
    unit = quantise_unit(np.ones((BAND, 1), np.float32))
    decode_units(encode_units([unit]), [BAND], 1)


def _starts(bands: Sequence[int]) -> np.ndarray:
    starts: np.ndarray = np.zeros(sum(bands), np.bool_)
    starts[np.cumsum([0, *bands[:-1]])] = True
    return starts
