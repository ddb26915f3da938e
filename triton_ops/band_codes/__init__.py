"""Fixed-width codes of transform components: 16 neighbours share a width and a scale, few outliers stand apart."""

from triton_ops.band_codes.reference import (
    BAND,
    MAX_WIDTH,
    Bands,
    pack_codes,
    packed_bytes,
    scale_of,
    to_components,
    unpack_codes,
)

__all__ = [
    "BAND",
    "MAX_WIDTH",
    "Bands",
    "pack_codes",
    "packed_bytes",
    "scale_of",
    "to_components",
    "unpack_codes",
]
