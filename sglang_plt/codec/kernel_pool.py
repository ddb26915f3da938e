"""A pool as the Triton kernels take it."""

from __future__ import annotations

from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows
from triton_ops.paged import PagedPool
from triton_ops.rope import Rotation


class KernelPool:
    """Keys and values of a pool, and how its keys are rotated; made once for all launches over it.

    Args:
        rotary: None where keys are stored rotated.

    Attributes:
        rotation: of the keys, on the pool's device; None without ``rotary``.

    Raises:
        ValueError: a head dim is odd.
    """

    def __init__(self, pool: PoolRows, rotary: Rotary | None) -> None:
        layout = pool.layout
        if layout.head_dim % 2 or layout.v_head_dim % 2:
            raise ValueError(
                f"codec: the Triton kernels need even head dims, got {layout.head_dim} and {layout.v_head_dim}; leave "
                "--plt-triton off"
            )
        self._pool = pool
        self.rotation: Rotation | None = None
        if rotary is not None:
            self.rotation = Rotation(rotary.cos_sin.float().to(pool.device).contiguous(), rotary.is_neox)
        self._made: dict[tuple[int, int], tuple[PagedPool, PagedPool | None]] = {}

    def layers(self, first: int = 0, stop: int | None = None) -> tuple[PagedPool, PagedPool | None]:
        """Keys and values of the layers ``first .. stop``, of all without; no values of latent rows."""
        pool = self._pool
        part = first, pool.layout.num_layers if stop is None else stop
        if part not in self._made:
            values = PagedPool.nhd(pool.values[slice(*part)]) if pool.layout.v_head_dim else None
            self._made[part] = PagedPool.nhd(pool.keys[slice(*part)]), values
        return self._made[part]
