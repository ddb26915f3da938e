"""Asymmetric integer groups, formats ``int8/1`` and ``int4/1``. ``reference`` specifies, ``cpu_*`` are the kernels."""

from triton_ops.int_groups.reference import (
    BITS,
    GROUP,
    NotEncodable,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    to_pool_dtype,
)

__all__ = [
    "BITS",
    "GROUP",
    "NotEncodable",
    "decode_keys",
    "decode_values",
    "encode_keys",
    "encode_values",
    "to_pool_dtype",
]
