"""Rotated Lloyd-Max codes, formats ``rotated1/1`` to ``rotated8/1``; ``reference`` specifies."""

from triton_ops.rotated.reference import BITS, NotEncodable, code_bytes, decode, encode

__all__ = ["BITS", "NotEncodable", "code_bytes", "decode", "encode"]
