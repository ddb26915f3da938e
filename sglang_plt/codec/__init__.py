"""KV rows <-> encoded blocks. ``make_codec`` picks a codec by name; FORMAT.md is normative for the bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sglang_plt.codec.base import Codec, EncodeError, exact_rows
from sglang_plt.codec.block import (
    BLOCK_TOKENS,
    BlockDamaged,
    BlockHeader,
    begin_block,
    block_limit,
    decode_block,
    encode_block,
    fingerprint,
)
from sglang_plt.codec.embedding import TokenEmbedding, as_tokens
from sglang_plt.codec.int_groups import IntGroups
from sglang_plt.codec.layers import LayerWriter
from sglang_plt.codec.predictive import Predictive
from sglang_plt.codec.profile import Profile, ProfileError, ProfileInfo
from sglang_plt.codec.profile_file import load_profile
from sglang_plt.codec.raw import Raw
from sglang_plt.codec.reference import MAX_REFERENCES, Reference, Stretch
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import EXACT_TOKENS, PoolRows, RowLayout
from sglang_plt.codec.workers import Workers, in_turn

CODECS: dict[str, Callable[[PoolRows, Rotary | None], Codec]] = {
    "raw": Raw,
    "int8": partial(IntGroups, bits=8),
    "int4": partial(IntGroups, bits=4),
}
"""Need nothing but the pool."""
INTEGERS = {"int8": 8, "int4": 4}
PROFILED = ("fast", "dense", "dense-tight", "hadamard")
"""Need a calibrated profile; ``dense-tight`` takes 0.47 of the step of ``dense``."""
_TIGHT = 0.47


def make_codec(
    name: str,
    pool: PoolRows,
    rotary: Rotary | None,
    profile: Profile | None = None,
    embedding: TokenEmbedding | None = None,
    triton: bool = False,
) -> Codec:
    """The codec ``name`` over ``pool``.

    Args:
        profile: for one of :data:`PROFILED`.
        embedding: of the model, for a profile that predicts from tokens.
        triton: take Triton kernels, where there are any: for all but ``raw``, for profiled codecs to decode.

    Raises:
        ValueError: no such codec (the message lists the names), or it cannot serve this pool.
    """
    if name in PROFILED:
        if profile is None:
            raise ValueError(f"codec {name!r} needs a profile; make one with sglang-plt calibrate")
        tight = _TIGHT if name == "dense-tight" else 1.0
        return Predictive(pool, rotary, profile, tight * profile.info.scale, embedding, triton)
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}; choose one of {', '.join((*CODECS, *PROFILED))}")
    if triton and name in INTEGERS:
        from sglang_plt.codec.int_triton import TritonIntGroups  # what it needs takes seconds to import

        return TritonIntGroups(pool, rotary, INTEGERS[name])
    return CODECS[name](pool, rotary)


__all__ = [
    "BLOCK_TOKENS",
    "CODECS",
    "EXACT_TOKENS",
    "MAX_REFERENCES",
    "PROFILED",
    "BlockDamaged",
    "BlockHeader",
    "Codec",
    "EncodeError",
    "IntGroups",
    "LayerWriter",
    "PoolRows",
    "Profile",
    "ProfileError",
    "ProfileInfo",
    "Raw",
    "Reference",
    "Rotary",
    "RowLayout",
    "Stretch",
    "TokenEmbedding",
    "Workers",
    "as_tokens",
    "begin_block",
    "block_limit",
    "decode_block",
    "encode_block",
    "exact_rows",
    "fingerprint",
    "in_turn",
    "load_profile",
    "make_codec",
]
