"""KV rows <-> encoded blocks. ``make_codec`` picks a codec by name; FORMAT.md is normative for the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sglang_plt.codec.base import Codec, EncodeError, exact_rows
from sglang_plt.codec.block import (
    BLOCK_TOKENS,
    BlockDamaged,
    BlockHeader,
    block_bytes,
    decode_block,
    encode_block,
    fingerprint,
)
from sglang_plt.codec.int_groups import IntGroups
from sglang_plt.codec.raw import Raw
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import EXACT_TOKENS, PoolRows, RowLayout

CODECS: dict[str, Callable[[PoolRows, Rotary | None], Codec]] = {
    "raw": Raw,
    "int8": partial(IntGroups, bits=8),
    "int4": partial(IntGroups, bits=4),
}


def make_codec(name: str, pool: PoolRows, rotary: Rotary | None) -> Codec:
    """The codec ``name`` over ``pool``.

    Raises:
        ValueError: no such codec (the message lists the names), or it cannot serve this pool.
    """
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; choose one of {', '.join(CODECS)}")
    return CODECS[name](pool, rotary)


__all__ = [
    "BLOCK_TOKENS",
    "CODECS",
    "EXACT_TOKENS",
    "BlockDamaged",
    "BlockHeader",
    "Codec",
    "EncodeError",
    "IntGroups",
    "PoolRows",
    "Raw",
    "Rotary",
    "RowLayout",
    "block_bytes",
    "decode_block",
    "encode_block",
    "exact_rows",
    "fingerprint",
    "make_codec",
]
