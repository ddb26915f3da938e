"""The immutable encoded block: a header that says what the payload is, a payload, one checksum over both.

Normative description: FORMAT.md. Everything a reader needs to refuse a block is checked before the pool is touched.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
import xxhash

from sglang_plt.blocks import BLOCK_TOKENS
from sglang_plt.codec.base import Codec, exact_rows
from sglang_plt.codec.layers import LayerWriter
from sglang_plt.codec.reference import BlockDamaged, OpenReference, Reference, Stretch

MAGIC = b"PLTB"
FORMAT_VERSION = 1
KEYS_ROTATED = 1
"""Flag: keys are stored as they were rotated, so the block serves its own position only."""

_FIELDS = struct.Struct("<4sHH8sQIIIIHHHHQQQ")  # the header without its checksum
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size

_DTYPE_CODES = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
    torch.float8_e4m3fnuz: 6,
    torch.float8_e5m2fnuz: 7,
    torch.uint8: 8,
    torch.int8: 9,
}


@dataclass(frozen=True)
class BlockHeader:
    """The fields before the checksum, in file order; offsets and types in FORMAT.md."""

    magic: bytes
    format_version: int
    codec_version: int
    codec: bytes
    fingerprint: int
    num_layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: int
    flags: int
    num_rows: int
    num_exact: int
    position: int
    payload_bytes: int
    profile: int

    def pack(self) -> bytes:
        """The 72 bytes in front of the checksum."""
        return _FIELDS.pack(*astuple(self))

    @classmethod
    def unpack(cls, block: np.ndarray) -> BlockHeader:
        """Read the fields of ``block``, unchecked; it must have :data:`HEADER_BYTES`."""
        return cls(*_FIELDS.unpack_from(block.data))


def fingerprint(*parts: str | int) -> int:
    """Stable 64-bit fingerprint of what makes KV interchangeable (model, revision, rotary parameters, rank, ...).

    ``xxh3_64`` of the parts, each as a type letter, the UTF-8 length and the text, so no two lists of parts collide by
    joining: ``fingerprint("a", "b") != fingerprint("ab")`` and ``fingerprint(1) != fingerprint("1")``.

    Raises:
        TypeError: a part is neither str nor int.
    """
    digest = xxhash.xxh3_64()
    for part in parts:
        if type(part) not in (str, int):
            raise TypeError(f"fingerprint: parts must be str or int, got {type(part).__name__}")
        text = str(part).encode()
        digest.update(b"%c%d:%b" % (ord("s" if isinstance(part, str) else "i"), len(text), text))
    return digest.intdigest()


def block_limit(codec: Codec, num_rows: int, num_exact: int) -> int:
    """Most bytes of a block of ``num_rows`` rows, header included; known before encoding, alike on every rank."""
    return HEADER_BYTES + codec.payload_limit(num_rows, num_exact)


def _expected(
    codec: Codec, model: int, num_rows: int, num_exact: int, position: int, payload_bytes: int
) -> BlockHeader:
    layout = codec.layout
    return BlockHeader(
        magic=MAGIC,
        format_version=FORMAT_VERSION,
        codec_version=codec.version,
        codec=codec.name.encode().ljust(8, b"\0"),
        fingerprint=model,
        num_layers=layout.num_layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        v_head_dim=layout.v_head_dim,
        dtype=_DTYPE_CODES[layout.dtype],
        flags=KEYS_ROTATED if codec.stores_rotated_keys else 0,
        num_rows=num_rows,
        num_exact=num_exact,
        position=position,
        payload_bytes=payload_bytes,
        profile=codec.profile_id,
    )


def _checksum(block: np.ndarray) -> int:
    digest = xxhash.xxh3_64(block[: _FIELDS.size].data)
    digest.update(block[HEADER_BYTES:].data)
    return digest.intdigest()


def encode_block(
    codec: Codec,
    model: int,
    slots: torch.Tensor,
    position: int,
    references: Sequence[Reference] = (),
    tokens: np.ndarray | None = None,
) -> np.ndarray:
    """Encode pool rows as one block.

    Args:
        codec: reads the rows.
        model: :func:`fingerprint` of everything KV depends on.
        slots: int64 ``[n]``, ``1 <= n <= 256``, rows of consecutive tokens.
        position: absolute position of the first one. Rows at positions 0..3 are kept bit for bit.
        references: blocks that stretches of the rows may be coded as differences from, in order of preference. One
            that is damaged, of another codec or profile, or has references itself is not used.
        tokens: int64 ``[n]``, ids of the rows; a codec that predicts from them needs the same to decode.

    Returns:
        uint8, at most :func:`block_limit`, read-only.

    Raises:
        EncodeError: a row holds a value that the codec cannot represent.
        ValueError: an argument is not as above.
    """
    if not 1 <= len(slots) <= BLOCK_TOKENS:
        raise ValueError(f"encode_block: need 1 to {BLOCK_TOKENS} slots, got {len(slots)}")
    num_exact = exact_rows(position, len(slots))
    block: np.ndarray = np.empty(block_limit(codec, len(slots), num_exact), np.uint8)
    usable = []
    for reference in references if codec.takes_references else ():
        with contextlib.suppress(BlockDamaged):
            usable.append(_open(codec, model, reference.block, reference.stretches))
    used = codec.encode(slots, position, num_exact, block[HEADER_BYTES:], usable, tokens)
    if HEADER_BYTES + used < len(block):
        block = block[: HEADER_BYTES + used].copy()
    header = _expected(codec, model, len(slots), num_exact, position, used)
    block[: _FIELDS.size] = np.frombuffer(header.pack(), np.uint8)
    block[_FIELDS.size : HEADER_BYTES] = np.frombuffer(_CHECKSUM.pack(_checksum(block)), np.uint8)
    block.flags.writeable = False
    return block


def check_block(codec: Codec, model: int, block: np.ndarray) -> BlockHeader:
    """Verify everything that can be verified about ``block``, checksum included, and return its header.

    Raises:
        BlockDamaged: the message begins with the field that is wrong.
    """
    if block.dtype != np.uint8 or block.ndim != 1 or not block.flags.c_contiguous:
        raise ValueError(f"block must be contiguous uint8 [bytes], got {block.dtype} {block.shape}")
    if len(block) < HEADER_BYTES:
        raise BlockDamaged(f"truncated: {len(block)} bytes, the header alone has {HEADER_BYTES}")
    header = BlockHeader.unpack(block)
    if header.magic != MAGIC:  # not a block at all: nothing after this would mean anything
        raise BlockDamaged(f"magic: expected {MAGIC!r}, got {header.magic!r}")
    if not 1 <= header.num_rows <= BLOCK_TOKENS:
        raise BlockDamaged(f"num_rows: expected 1..{BLOCK_TOKENS}, got {header.num_rows}")
    num_exact = exact_rows(header.position, header.num_rows)
    limit = codec.payload_limit(header.num_rows, num_exact)
    payload_bytes = limit if codec.fixed_size else min(header.payload_bytes, limit)
    expected = _expected(codec, model, header.num_rows, num_exact, header.position, payload_bytes)
    for name, want in vars(expected).items():
        got = getattr(header, name)
        if got != want:
            raise BlockDamaged(f"{name}: expected {want!r}, got {got!r}")
    if len(block) != HEADER_BYTES + header.payload_bytes:
        raise BlockDamaged(f"truncated: expected {HEADER_BYTES + header.payload_bytes} bytes, got {len(block)}")
    (stored,) = _CHECKSUM.unpack_from(block.data, _FIELDS.size)
    if stored != _checksum(block):
        raise BlockDamaged(f"checksum: expected {stored:#018x}, got {_checksum(block):#018x}")
    return header


def _open(codec: Codec, model: int, block: np.ndarray, stretches: tuple[Stretch, ...] = ()) -> OpenReference:
    header = check_block(codec, model, block)
    (checksum,) = _CHECKSUM.unpack_from(block.data, _FIELDS.size)
    num_exact = exact_rows(header.position, header.num_rows)
    return OpenReference(checksum, block[HEADER_BYTES:], header.num_rows, num_exact, stretches)


def decode_block(
    codec: Codec,
    model: int,
    block: np.ndarray,
    start: int,
    stop: int,
    slots: torch.Tensor,
    position: int,
    references: Sequence[np.ndarray] = (),
    tokens: np.ndarray | None = None,
) -> None:
    """Reconstruct rows ``start .. stop`` of ``block``; takes and raises what :func:`begin_block` does."""
    begin_block(codec, model, block, start, stop, slots, position, references, tokens).write_all()


def begin_block(
    codec: Codec,
    model: int,
    block: np.ndarray,
    start: int,
    stop: int,
    slots: torch.Tensor,
    position: int,
    references: Sequence[np.ndarray] = (),
    tokens: np.ndarray | None = None,
) -> LayerWriter:
    """Reconstruct rows ``start .. stop`` of ``block`` into the codec's pool, layer by layer.

    Everything that can be wrong with the bytes is found before this returns, decoding of the entropy code included.

    Args:
        codec, model: as at :func:`encode_block`.
        block: its result, or what a store made of it.
        start, stop: half-open row range.
        slots: int64 ``[stop - start]``, where the rows go.
        position: absolute position of row 0 of the block at its new place.
        references: the blocks that it was encoded with.
        tokens: int64, of all its rows, as it was encoded with.

    Raises:
        BlockDamaged: the bytes are not a block of this codec, model and layout, or cannot serve this position; or a
            reference is damaged, or one that the rows need is not there; or the tokens are others.
        ValueError: another argument is not as above.
    """
    header = check_block(codec, model, block)
    bound = codec.stores_rotated_keys or start < header.num_exact
    if bound and position != header.position:
        raise BlockDamaged(f"position: keys are stored rotated at {header.position}, asked for {position}")
    opened = [_open(codec, model, reference) for reference in references]
    payload = block[HEADER_BYTES:]
    return codec.begin(payload, header.num_rows, header.num_exact, start, stop, slots, position, opened, tokens)
