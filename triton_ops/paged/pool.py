"""The buffers of a pool in one shape, whatever their layout; and the plain-torch gather and scatter by slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
"""Types of pool element, and the number that the kernels know them by."""


@dataclass(frozen=True)
class PagedPool:
    """One buffer a layer, addressed by ``slot = page * page_size + place in the page``.

    Attributes:
        views: for every layer ``[pages, page_size, heads, dim]``, views and not copies; of one shape, one type, one
            device and the same strides, the last of them 1. A pool addressed by slot alone has pages of one slot.

    Raises:
        ValueError, TypeError: the views are not as above.
    """

    views: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if not self.views:
            raise ValueError("PagedPool: no buffers")
        first = self.views[0]
        if first.dtype not in DTYPES:
            raise TypeError(f"PagedPool: buffers must be one of {', '.join(map(str, DTYPES))}, got {first.dtype}")
        if first.ndim != 4 or (first.stride(3) != 1 and first.shape[3] > 1):
            raise ValueError(
                f"PagedPool: buffers must be [pages, page_size, heads, dim] with channels side by side, got shape "
                f"{tuple(first.shape)} strides {first.stride()}"
            )
        for layer, view in enumerate(self.views):
            got = (view.shape, view.stride(), view.dtype, view.device)
            if got != (first.shape, first.stride(), first.dtype, first.device):
                raise ValueError(f"PagedPool: buffer {layer} is not like buffer 0: {got}")
            if (view.data_ptr() - first.data_ptr()) % first.dtype.itemsize:
                raise ValueError(f"PagedPool: buffer {layer} does not lie a whole number of elements from buffer 0")

    @staticmethod
    def nhd(buffers: Sequence[torch.Tensor]) -> PagedPool:
        """From ``[slots, heads, dim]`` (as SGLang has them) or ``[pages, page_size, heads, dim]``."""
        return PagedPool(tuple(buffer.unsqueeze(1) if buffer.ndim == 3 else buffer for buffer in buffers))

    @staticmethod
    def hnd(buffers: Sequence[torch.Tensor]) -> PagedPool:
        """From ``[pages, heads, page_size, dim]``."""
        return PagedPool(tuple(buffer.transpose(1, 2) for buffer in buffers))

    @property
    def num_layers(self) -> int:
        return len(self.views)

    @property
    def page_size(self) -> int:
        return self.views[0].shape[1]

    @property
    def heads(self) -> int:
        return self.views[0].shape[2]

    @property
    def dim(self) -> int:
        return self.views[0].shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.views[0].dtype

    @property
    def device(self) -> torch.device:
        return self.views[0].device

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from a page, a place in a page and a head to the next."""
        page, place, head, _ = self.views[0].stride()
        return page, place, head

    @cached_property
    def offsets(self) -> torch.Tensor:
        """int64 ``[layers]`` on the pool's device: elements from the first buffer to each, negative ones too."""
        return torch.tensor(self._offsets, dtype=torch.int64, device=self.device)

    @property
    def align(self) -> int:
        """What divides every offset, 1 to 16."""
        return math.gcd(16, *self._offsets)

    @cached_property
    def _offsets(self) -> list[int]:
        first = self.views[0].data_ptr()
        return [(view.data_ptr() - first) // self.dtype.itemsize for view in self.views]

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``slots`` int64 ``[n]``: ``[n, heads, dim]``, a copy."""
        return self._bytes_of(layer)[slots // self.page_size, slots % self.page_size].view(self.dtype)

    def scatter(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``rows`` ``[n, heads, dim]`` of the pool's type to ``slots`` int64 ``[n]``."""
        view = self._bytes_of(layer)
        view[slots // self.page_size, slots % self.page_size] = rows.contiguous().view(view.dtype)

    def _bytes_of(self, layer: int) -> torch.Tensor:
        """float8 as bytes: torch has no indexed copy for it."""
        view = self.views[layer]
        return view.view(torch.uint8) if view.dtype.itemsize == 1 else view
