"""float32 to and from the elements of a pool: the specification of :mod:`triton_ops.paged.kernel`."""

from __future__ import annotations

import torch

_SATURATING = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def to_pool(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite float32 to the pool's type, to nearest even; float16 and float8 saturate at their largest number."""
    if dtype in _SATURATING:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def to_float(x: torch.Tensor) -> torch.Tensor:
    """A pool's elements as float32, exact."""
    return x.to(torch.float32)
