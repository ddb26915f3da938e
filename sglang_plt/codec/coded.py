"""Payloads of ``dense`` and ``fast`` taken apart and put together; FORMAT.md is normative for the bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from sglang_plt.codec import delta
from sglang_plt.codec.packing import Packing
from sglang_plt.codec.reference import Sources

HEAD = struct.Struct("<HHf")
"""Mode, escaped rows, steps of the profile in a step of this block."""


class Mode(IntEnum):
    """How a payload goes on behind its head and its exact rows."""

    CODED = 0
    FALLBACK = 1
    DIFFERENCES = 2


@dataclass(frozen=True)
class CodedRows:
    """Rows behind the exact ones, as codes.

    Attributes:
        num_rows: of them.
        scale: steps of the profile in a step.
        escaped: int64 ``[escaped rows]``, which rows are in ``exceptions``, their codes meaningless.
        exceptions: float32 ``[escaped rows, width]`` a layer; None while encoding.
        own: what the packing stored of every unit, of rows without a reference; empty where all have one.
        sources: None where no row has one.
        differences: int16 ``[components, rows]`` a unit, of rows with a reference.
    """

    num_rows: int
    scale: float
    escaped: np.ndarray
    exceptions: list[np.ndarray] | None
    own: list[Any]
    sources: Sources | None = None
    differences: Sequence[np.ndarray] = ()


def write(coded: CodedRows, exact: Sequence[bytes], rows: Sequence[torch.Tensor], packing: Packing) -> bytes:
    """The payload of ``coded``.

    Args:
        exact: the bytes of the exact rows.
        rows: of every layer, float32 ``[coded rows, width]``, of which the escaped ones are stored.
    """
    mode = Mode.CODED if coded.sources is None else Mode.DIFFERENCES
    parts = [HEAD.pack(mode, len(coded.escaped), coded.scale), *exact]
    parts.append(coded.escaped.astype(np.uint8).tobytes())
    if len(coded.escaped):
        where = torch.from_numpy(coded.escaped)
        parts += [row[where.to(row.device)].cpu().numpy().tobytes() for row in rows]
    if coded.sources is not None:
        parts += [coded.sources.pack(), delta.pack(coded.differences)]
    if coded.own:
        parts.append(packing.pack(coded.own))
    return b"".join(parts)


def parse(
    payload: np.ndarray, at: int, num_rows: int, widths: Sequence[int], width: int, num_layers: int, packing: Packing
) -> CodedRows:
    """Inverse of :func:`write`, from behind the exact rows.

    Args:
        at: where those end.
        num_rows: coded rows.
        widths: components of every unit.
        width: channels of a layer.

    Raises:
        ValueError: the payload is not that.
    """
    mode, num_escaped, scale = HEAD.unpack_from(payload.data)
    if mode not in (Mode.CODED, Mode.DIFFERENCES) or not np.isfinite(scale):
        raise ValueError(f"codec: a payload of mode {mode} and scale {scale}")
    escaped: np.ndarray = payload[at : at + num_escaped].astype(np.int64)
    if (escaped >= num_rows).any():
        raise ValueError(f"codec: escaped row {escaped.max()} of {num_rows}")
    at += num_escaped
    size = 4 * num_escaped * width
    exceptions = []
    for layer in range(num_layers):
        section = payload[at + layer * size : at + (layer + 1) * size].copy()
        exceptions.append(section.view(np.float32).reshape(num_escaped, width))
    at += num_layers * size
    if mode == Mode.CODED:
        own = packing.unpack(payload[at:].data, widths, num_rows)
        return CodedRows(num_rows, scale, escaped, exceptions, own)
    sources, used = Sources.unpack(payload[at:].data, num_rows)
    at += used
    differences, used = delta.unpack(payload[at:].data, widths, len(sources.rows))
    at += used
    own_rows = num_rows - len(sources.rows)
    own = packing.unpack(payload[at:].data, widths, own_rows) if own_rows else []
    return CodedRows(num_rows, scale, escaped, exceptions, own, sources, differences)


def unit_components(
    coded: CodedRows,
    opened: Sequence[CodedRows],
    number: int,
    first: int,
    last: int,
    packing: Packing,
    width: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Components of one unit, of the coded rows ``first .. last``.

    The transform is linear and the prediction affine, so a row that differs from its reference by some components is
    rebuilt from the sum of both rows' components; the reference's rows themselves are never needed.

    Args:
        opened: the reference blocks that ``coded.sources`` numbers, which have no references of their own.
        width: components of the unit.

    Returns:
        float32 ``[last - first, k]`` in steps of the profile, and int64 ``[k]`` numbers of components.
    """
    if coded.sources is None:
        kept, used = packing.dequantise(coded.own[number], first, last, device)
        return kept * coded.scale, used
    sources = coded.sources
    total = torch.zeros(last - first, width, device=device)
    touched = torch.zeros(width, dtype=torch.bool, device=device)

    def add(rows: np.ndarray, kept: torch.Tensor, used: torch.Tensor, scale: float) -> None:
        kept, used = kept[:, used < width], used[used < width]
        touched[used] = True
        total[torch.from_numpy(rows - first).to(device)[:, None], used] += kept * scale

    own = np.flatnonzero(sources.block < 0)
    low, high = _span(own, first, last)
    if high > low:
        add(own[low:high], *packing.dequantise(coded.own[number], low, high, device), coded.scale)
    low, high = _span(sources.rows, first, last)
    if high > low:
        codes = coded.differences[number][:, low:high]
        used = np.flatnonzero(codes.any(axis=1))
        kept = torch.from_numpy(codes[used]).to(device).float().T
        add(sources.rows[low:high], kept, torch.from_numpy(used).to(device), coded.scale)
    inside = sources.rows[low:high]
    for block in np.unique(sources.block[inside]):
        rows = inside[sources.block[inside] == block]
        of, wanted = opened[block], sources.row[rows].astype(np.int64)
        begin, end = int(wanted.min()), int(wanted.max()) + 1
        kept, used = packing.dequantise(of.own[number], begin, end, device)
        add(rows, kept[torch.from_numpy(wanted - begin).to(device)], used, of.scale)
    columns = touched.nonzero().flatten()
    return total[:, columns], columns


def _span(rows: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """Where the rows ``first .. last`` lie in ascending ``rows``."""
    return int(np.searchsorted(rows, first)), int(np.searchsorted(rows, last))
