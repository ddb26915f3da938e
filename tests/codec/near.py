"""Blocks that are coded as differences from others, for their tests, and what FORMAT.md says they decode to."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import xxhash

from sglang_plt.codec import Profile, Reference, Stretch, decode_block, encode_block, entropy, exact_rows, make_codec
from sglang_plt.codec.block import HEADER_BYTES, BlockHeader
from sglang_plt.codec.packings import PACKINGS
from tests.codec.correlated import MODEL, ROTARY, SOURCE, Source, profile_of, read
from tests.codec.pools import some_slots

POSITION = 300


def near(rows: Sequence[torch.Tensor], share: float, seed: int = 5) -> list[torch.Tensor]:
    """``rows`` with noise of ``share`` times the standard deviation of their layer."""
    generator = torch.Generator().manual_seed(seed)
    return [row + share * row.std() * torch.randn(row.shape, generator=generator) for row in rows]


def picked(rows: Sequence[torch.Tensor], which: Sequence[int] | slice | torch.Tensor) -> list[torch.Tensor]:
    return [row[which] for row in rows]


def joined(*parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def encoded(
    name: str,
    rows: Sequence[torch.Tensor],
    references: Sequence[Reference] = (),
    position: int = POSITION,
    source: Source = SOURCE,
    profile: Profile | None = None,
) -> np.ndarray:
    """The block of ``rows``, float32 ``[n, width]`` a layer, keys without rotation."""
    slots = some_slots(len(rows[0]))
    pool, profile = source.pool(list(rows), slots, ROTARY, position), profile or profile_of(source, name)
    return encode_block(make_codec(name, pool, ROTARY, profile), MODEL, slots, position, references)


def decoded(
    name: str,
    block: np.ndarray,
    references: Sequence[np.ndarray] = (),
    position: int = POSITION,
    start: int = 0,
    stop: int | None = None,
    source: Source = SOURCE,
    profile: Profile | None = None,
) -> torch.Tensor:
    """Rows ``start .. stop`` of ``block`` at ``position``, as of :func:`read`; nothing else may be written."""
    stop = BlockHeader.unpack(block).num_rows if stop is None else stop
    pool, slots = source.empty(), some_slots(stop - start, seed=2)
    codec = make_codec(name, pool, ROTARY, profile or profile_of(source, name))
    decode_block(codec, MODEL, block, start, stop, slots, position, references)
    others = torch.ones(len(pool.keys[0]), dtype=torch.bool)
    others[slots] = False
    assert all(bool(buffer[others].isnan().all()) for buffer in (*pool.keys, *pool.values))
    return read(pool, slots, ROTARY, position + start)


def whole(block: np.ndarray, length: int, row: int = 0, first: int = 0) -> Reference:
    """All of a block's rows from ``first`` on for those from ``row`` on."""
    return Reference(block, (Stretch(first, row, length),))


def mode(block: np.ndarray) -> int:
    return int(block[HEADER_BYTES])


def sealed(block: np.ndarray) -> np.ndarray:
    """A copy with length and checksum made right: damage that no checksum shows."""
    block = block.copy()
    block[56:64] = np.frombuffer(struct.pack("<Q", len(block) - HEADER_BYTES), np.uint8)
    digest = xxhash.xxh3_64(block[:72].tobytes() + block[HEADER_BYTES:].tobytes())
    block[72:80] = np.frombuffer(struct.pack("<Q", digest.intdigest()), np.uint8)
    return block


class Read:
    """A payload read as FORMAT.md has it, row by row.

    Attributes:
        scale: of the block.
        codes: of every coded row and unit: what its packing stored, or a difference; float64.
        source: of every coded row, ``(checksum, row)`` of its reference, or None.
        escaped: row -> its numbers, float32 ``[layers, width]``.
    """

    def __init__(self, name: str, block: np.ndarray, source: Source, profile: Profile) -> None:
        header, data = BlockHeader.unpack(block), block[HEADER_BYTES:].tobytes()
        widths = [len(layers) * source.width for layers in profile.info.units]
        self.rows = header.num_rows - exact_rows(header.position, header.num_rows)
        kind, count, self.scale = struct.unpack_from("<HHf", data)
        at = 8 + (header.num_rows - self.rows) * source.layout.row_bytes
        where, size = list(data[at : at + count]), source.layers * count * source.width
        numbers = np.frombuffer(data, "<f4", size, at + count).reshape(source.layers, count, source.width)
        self.escaped = {row: numbers[:, index] for index, row in enumerate(where)}
        at += count + 4 * size
        self.source: list[tuple[int, int] | None] = [None] * self.rows
        self.codes = [[np.zeros(width) for width in widths] for _ in range(self.rows)]
        if kind == 2:
            at = self._read_differences(data, at, widths)
        own = [row for row, found in enumerate(self.source) if found is None]
        if not own:
            assert at == len(data)
            return
        packing = PACKINGS[name]
        for unit, stored in enumerate(packing.unpack(memoryview(data)[at:], widths, len(own))):
            for number, row in enumerate(own):
                values, used = packing.dequantise(stored, number, number + 1, torch.device("cpu"))
                inside = used < widths[unit]
                self.codes[row][unit][used[inside]] = values[0, inside]

    def _read_differences(self, data: bytes, at: int, widths: Sequence[int]) -> int:
        references, stretches = data[at], data[at + 1]
        checksums = struct.unpack_from(f"<{references}Q", data, at + 2)
        at += 2 + 8 * references
        for _ in range(stretches):
            number, first, row, last = data[at : at + 4]
            for offset in range(last + 1):
                assert self.source[row + offset] is None
                self.source[row + offset] = checksums[number], first + offset
            at += 4
        rows = [row for row, found in enumerate(self.source) if found is not None]
        grouped, at, group_of = data[at], at + 1, [0] * len(rows)
        if grouped:
            for number in range(len(rows)):
                group_of[number] = data[at + number // 4] >> (6 - 2 * (number % 4)) & 3
                group_of[number] = (group_of[number] & 1) << 1 | group_of[number] >> 1  # the lower bit comes first
            at += -(-len(rows) // 4)
        padded = [-(-width // 16) * 16 for width in widths]
        for group in range(max(group_of) + 1):
            (size,) = struct.unpack_from("<I", data, at)
            members = [row for row, its in zip(rows, group_of, strict=True) if its == group]
            if members:
                codes = entropy.decode_numbers(data[at + 4 : at + 4 + size], sum(padded), len(members))
                for number, row in enumerate(members):
                    for unit, width in enumerate(widths):
                        self.codes[row][unit][:] = codes[sum(padded[:unit]) :, number][:width]
            at += 4 + size
        return at


def twin(
    name: str, block: np.ndarray, references: Mapping[int, np.ndarray], source: Source, profile: Profile
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded rows rebuilt one by one, in float64, without a product of the codec.

    Args:
        references: by checksum.

    Returns:
        float32 ``[layers, coded rows, width]`` twice: the rows, and of rows with a reference what their differences add
        to it through the linear part of the transform.
    """
    this, others = (
        Read(name, block, source, profile),
        {at: Read(name, other, source, profile) for at, other in references.items()},
    )
    found, added = np.zeros((2, source.layers, this.rows, source.width))
    for row in range(this.rows):
        below, change = np.zeros(source.width), np.zeros(source.width)
        for number, (layers, unit) in enumerate(zip(profile.info.units, profile.units, strict=True)):
            weights, basis = unit.weights.dense().double().numpy(), unit.basis.dense().double().numpy()
            components = this.scale * this.codes[row][number]
            moved = components @ basis
            if this.source[row] is not None:
                components = PACKINGS[name].difference_step * components
                moved = components @ basis
                checksum, at = this.source[row]
                components = components + others[checksum].scale * others[checksum].codes[at][number]
            whole = unit.bias.double().numpy() + components @ basis
            if len(weights):
                whole, moved = whole + below @ weights, moved + change @ weights
            for index, layer in enumerate(layers):
                part = slice(index * source.width, (index + 1) * source.width)
                found[layer, row], added[layer, row] = whole[part], moved[part]
            below, change = whole[-source.width :], moved[-source.width :]
        if row in this.escaped:
            found[:, row] = this.escaped[row]
    return torch.from_numpy(found).float(), torch.from_numpy(added).float()
