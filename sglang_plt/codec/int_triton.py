"""``int8`` and ``int4`` by the Triton kernels of :mod:`triton_ops.int_groups`: the same payloads, the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_plt.codec.base import EncodeError, as_tensor
from sglang_plt.codec.int_groups import IntGroups
from sglang_plt.codec.kernel_pool import KernelPool
from sglang_plt.codec.layers import Write
from sglang_plt.codec.reference import OpenReference
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows
from triton_ops.int_groups.blocks import Block
from triton_ops.int_groups.kernel import decode
from triton_ops.int_groups.kernel_encode import encode


class TritonIntGroups(IntGroups):
    """One launch gathers, undoes the rotation, quantises and packs a block; another does the reverse into the pool.

    Args:
        bits: 4 or 8.

    Raises:
        ValueError: as :class:`IntGroups`; or a head dim is odd.
    """

    def __init__(self, pool: PoolRows, rotary: Rotary | None, bits: int) -> None:
        super().__init__(pool, rotary, bits, kernels=False)
        self._paged = KernelPool(pool, rotary)

    def _for_pool(self, pool: PoolRows) -> IntGroups:
        return TritonIntGroups(pool, self.rotary, self.bits)

    def _encode(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        out: np.ndarray,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> int:
        if self.rotary is not None:
            self.rotary.check_positions(position, len(slots))
        payload = torch.zeros(len(out), dtype=torch.uint8, device=self.pool.device)
        block, slots = Block(0, len(slots), num_exact, 0, len(slots), position), slots.to(self.pool.device).contiguous()
        failed = encode(payload, [block], *self._paged.layers(), slots, self.bits, self._paged.rotation)
        as_tensor(out).copy_(payload)
        if int(failed.max()):
            raise EncodeError(f"codec {self.name}: the rows hold a value not finite or beyond 65504")
        return len(out)

    def _begin(
        self,
        payload: np.ndarray,
        num_rows: int,
        num_exact: int,
        start: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> Write:
        if self.rotary is not None:
            self.rotary.check_positions(position + start, len(slots))
        moved, record_bytes = as_tensor(payload).to(self.pool.device), self._sections(num_rows, num_exact)[-1]
        block = Block(0, num_rows, num_exact, start, start + len(slots), position)
        slots = slots.to(self.pool.device).contiguous()

        def write(first: int, stop: int) -> None:
            records = moved[first * record_bytes : stop * record_bytes]
            decode(records, [block], *self._paged.layers(first, stop), slots, self.bits, self._paged.rotation)

        return write
