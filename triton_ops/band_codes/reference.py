"""Band codes, format ``bands/1``: the plain-torch specification of the CPU kernels and of the Triton kernels.

A *band* is 16 neighbouring components of one unit over all rows of a block. It has a width ``w`` of 0 to 12 bits and a
scale; a component is ``(code - (2**w - 1) / 2) * scale`` for a code of ``w`` bits, so levels lie symmetrically around
zero and none is zero itself; with ``w = 0`` every component is zero. What that misses by too much is an *outlier*: its
position and its value in float16, which replaces the decoded one.

    scale   2**(k / 4 - 16) for an index k of 0..255: the float32 nearest to 2**((k mod 4) / 4), times a power of two
    packed  band after band; in a band row after row, 2 w bytes each: component j in bits j w .. j w + w - 1, least
            significant bit first
    order   of outliers: position = ((band * rows) + row) * 16 + component of the band, ascending

Decoding is exact, one fp32 product a component, so every backend must give the same bits. How an encoder chooses
widths, scales and outliers is its own affair; :mod:`triton_ops.band_codes.cpu_encode` says how ours does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BAND = 16
MAX_WIDTH = 12
SCALE_BIAS = 64  # index of scale 1
_QUARTERS = np.array([1.0, 1.1892071, 1.4142135, 1.6817929], np.float32)


@dataclass(frozen=True)
class Bands:
    """The codes of one unit's components over the rows of a block.

    Attributes:
        rows: number of rows.
        widths: uint8 ``[bands]``, 0..12.
        scales: uint8 ``[bands]``, indices.
        packed: uint8 ``[packed_bytes(widths, rows)]``.
        where: int64 ``[outliers]``, ascending positions.
        values: float16 ``[outliers]``.
    """

    rows: int
    widths: np.ndarray
    scales: np.ndarray
    packed: np.ndarray
    where: np.ndarray
    values: np.ndarray


def scale_of(index: np.ndarray) -> np.ndarray:
    """float32 scales of uint8 indices."""
    index = np.asarray(index).astype(np.int32)
    return np.ldexp(_QUARTERS[index % 4], index // 4 - SCALE_BIAS // 4).astype(np.float32)


def packed_bytes(widths: np.ndarray, rows: int) -> int:
    """Bytes of all packed codes."""
    return int(widths.sum(dtype=np.int64)) * rows * BAND // 8


def pack_codes(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Pack one band.

    Args:
        codes: int64 ``[rows, 16]``, each below ``2**width``.

    Returns:
        uint8 ``[rows, 2 * width]``.
    """
    bits = (codes[..., None] >> torch.arange(width)) & 1
    octets = bits.reshape(len(codes), 2 * width, 8)
    return (octets << torch.arange(8)).sum(-1).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Inverse of :func:`pack_codes`, int64 ``[rows, 16]``."""
    bits = (packed.long()[..., None] >> torch.arange(8)) & 1
    values = bits.reshape(len(packed), BAND, width)
    return (values << torch.arange(width)).sum(-1)


def to_components(bands: Bands, start: int, stop: int) -> torch.Tensor:
    """Rows ``start .. stop``, float32 ``[stop - start, 16 * bands]``."""
    out = torch.zeros(bands.rows, len(bands.widths), BAND)
    scales, at = torch.from_numpy(scale_of(bands.scales)), 0
    for band, width in enumerate(bands.widths.tolist()):
        size = bands.rows * 2 * width
        if width:
            packed = torch.from_numpy(bands.packed[at : at + size].copy()).view(bands.rows, 2 * width)
            out[:, band] = (unpack_codes(packed, width).float() - (2**width - 1) / 2) * scales[band]
        at += size
    flat = out.transpose(0, 1).reshape(-1)
    flat[torch.from_numpy(bands.where)] = torch.from_numpy(bands.values.astype(np.float32))
    rows = flat.view(len(bands.widths), bands.rows, BAND).transpose(0, 1)[start:stop]
    return rows.reshape(stop - start, BAND * len(bands.widths))
