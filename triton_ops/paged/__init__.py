"""Paged KV pools as the Triton kernels address them: one row a token, found by its slot."""

from triton_ops.paged.pool import DTYPES, PagedPool

__all__ = ["DTYPES", "PagedPool"]
