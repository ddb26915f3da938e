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
from sglang_plt.codec.reference import BlockDamaged, Sources
from triton_ops.band_codes import BAND

HEAD = struct.Struct("<HHf")
"""Mode, escaped rows, steps of the profile in a step of this block."""

_MALFORMED = (ValueError, IndexError, struct.error)
"""What reading past the end of a payload, or numbers that do not go together, end in."""


class Mode(IntEnum):
    """How a payload goes on behind its head and its exact rows."""

    CODED = 0
    FALLBACK = 1
    DIFFERENCES = 2


TOKENS = 4
"""Added to the mode where rows are predicted from their tokens, whose hash stands in front of the codes."""
_HASH = struct.Struct("<Q")


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
        tokens: hash of the tokens that rows are predicted from; None where they are not.
    """

    num_rows: int
    scale: float
    escaped: np.ndarray
    exceptions: list[np.ndarray] | None
    own: list[Any]
    sources: Sources | None = None
    differences: Sequence[np.ndarray] = ()
    tokens: int | None = None


def write(coded: CodedRows, exact: Sequence[bytes], rows: Sequence[torch.Tensor], packing: Packing) -> bytes:
    """The payload of ``coded``.

    Args:
        exact: the bytes of the exact rows.
        rows: of every layer, float32 ``[coded rows, width]``, of which the escaped ones are stored.
    """
    mode = Mode.CODED if coded.sources is None else Mode.DIFFERENCES
    predicted = 0 if coded.tokens is None else TOKENS
    parts = [HEAD.pack(mode + predicted, len(coded.escaped), coded.scale), *exact]
    parts.append(coded.escaped.astype(np.uint8).tobytes())
    if len(coded.escaped):
        where = torch.from_numpy(coded.escaped)
        parts += [row[where.to(row.device)].cpu().numpy().tobytes() for row in rows]
    if coded.tokens is not None:
        parts.append(_HASH.pack(coded.tokens))
    if coded.sources is not None:
        parts += [coded.sources.pack(), delta.pack(coded.differences)]
    if coded.own:
        parts.append(packing.pack(coded.own))
    return b"".join(parts)


def mode_of(payload: np.ndarray, exact_bytes: int, fallback_bytes: int) -> Mode:
    """How a payload goes on.

    Args:
        exact_bytes: of its exact rows.
        fallback_bytes: of what follows the head of a fallback.

    Raises:
        BlockDamaged: it is of no mode, or too short for its exact rows.
    """
    mode = HEAD.unpack_from(payload.data)[0] if len(payload) >= HEAD.size else None
    if mode == Mode.FALLBACK and len(payload) == HEAD.size + fallback_bytes:
        return Mode.FALLBACK
    if mode is not None and _coded_mode(mode) and len(payload) >= HEAD.size + exact_bytes:
        return Mode(mode & ~TOKENS)
    raise BlockDamaged(f"payload: {len(payload)} bytes of mode {mode}")


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
        BlockDamaged: the payload is not that.
    """
    try:
        return _parse(payload, at, num_rows, widths, width, num_layers, packing)
    except _MALFORMED as error:
        raise BlockDamaged(f"payload: {error}") from error


def _parse(
    payload: np.ndarray, at: int, num_rows: int, widths: Sequence[int], width: int, num_layers: int, packing: Packing
) -> CodedRows:
    mode, num_escaped, scale = HEAD.unpack_from(payload.data)
    if not _coded_mode(mode) or not np.isfinite(scale):
        raise ValueError(f"codec: a payload of mode {mode} and scale {scale}")
    escaped: np.ndarray = payload[at : at + num_escaped].astype(np.int64)
    if len(escaped) != num_escaped or (np.diff(escaped, append=num_rows) <= 0).any():
        raise ValueError(f"codec: {num_escaped} escaped rows of {num_rows}, {escaped.tolist()}")
    at += num_escaped
    size = 4 * num_escaped * width
    exceptions = []
    for layer in range(num_layers):
        section = payload[at + layer * size : at + (layer + 1) * size].copy()
        exceptions.append(section.view(np.float32).reshape(num_escaped, width))
    at += num_layers * size
    tokens: int | None = None
    if mode & TOKENS:
        (tokens,) = _HASH.unpack_from(payload.data, at)
        at += _HASH.size
    if mode & ~TOKENS == Mode.CODED:
        own = packing.unpack(payload[at:].data, widths, num_rows)
        return CodedRows(num_rows, scale, escaped, exceptions, own, tokens=tokens)
    sources, used = Sources.unpack(payload[at:].data, num_rows)
    at += used
    differences, used = delta.unpack(payload[at:].data, widths, len(sources.rows))
    at += used
    own_rows = num_rows - len(sources.rows)
    if not own_rows and at != len(payload):
        raise ValueError(f"codec: {len(payload) - at} bytes are left over")
    own = packing.unpack(payload[at:].data, widths, own_rows) if own_rows else []
    return CodedRows(num_rows, scale, escaped, exceptions, own, sources, differences, tokens)


def _coded_mode(mode: int) -> bool:
    return mode & ~TOKENS in (Mode.CODED, Mode.DIFFERENCES)


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
    total = torch.zeros(width, last - first, device=device)
    touched = torch.zeros(width, dtype=torch.bool, device=device)

    def add(row: int, kept: torch.Tensor, used: torch.Tensor, scale: float) -> None:
        """Add to rows from ``row`` on what is ``kept``, float32 ``[rows, k]``, of the components ``used``."""
        touched[used] = True
        total[:, row - first : row - first + len(kept)].index_add_(0, used, kept.T, alpha=scale)

    own = np.flatnonzero(sources.block < 0)
    low, high = _span(own, first, last)
    if high > low:
        kept, used = _inside(*packing.dequantise(coded.own[number], low, high, device), width)
        for at, row, length in _runs(own[low:high]):
            add(row, kept[at : at + length], used, coded.scale)
    low, high = _span(sources.rows, first, last)
    if high > low:
        codes = coded.differences[number][:, low:high]
        where = np.flatnonzero(codes.any(axis=1))
        kept, used = torch.from_numpy(codes[where]).to(device).float().T, torch.from_numpy(where).to(device)
        for at, row, length in _runs(sources.rows[low:high]):
            add(row, kept[at : at + length], used, coded.scale * packing.difference_step)
    stretches = [stretch for stretch in sources.stretches() if stretch[2] < last and stretch[2] + stretch[3] > first]
    for block, of in enumerate(opened):
        begins = [begin for number_of, begin, _, _ in stretches if number_of == block]
        if not begins:
            continue
        ends = [begin + length for number_of, begin, _, length in stretches if number_of == block]
        least = min(begins)
        kept, used = _inside(*packing.dequantise(of.own[number], least, max(ends), device), width)
        for number_of, begin, row, length in stretches:
            skip = max(0, first - row)
            stop = min(length, last - row)
            if number_of == block:
                add(row + skip, kept[begin - least + skip : begin - least + stop], used, of.scale)
    columns = touched.nonzero().flatten()
    return total[columns].T, columns


def _inside(kept: torch.Tensor, used: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave out the padding of bands."""
    return (kept, used) if not width % BAND else (kept[:, used < width], used[used < width])


def _runs(rows: np.ndarray) -> list[tuple[int, int, int]]:
    """``(index, first row, rows)`` of every run of neighbours in ascending ``rows``."""
    begins = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    lengths = np.diff(begins, append=len(rows))
    return list(zip(begins.tolist(), rows[begins].tolist(), lengths.tolist(), strict=True))


def _span(rows: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """Where the rows ``first .. last`` lie in ascending ``rows``."""
    return int(np.searchsorted(rows, first)), int(np.searchsorted(rows, last))
