"""What every codec promises: rows of a pool to payload bytes and back."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sglang_plt.codec.layers import LayerWriter, Write
from sglang_plt.codec.reference import OpenReference
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import EXACT_TOKENS, PoolRows, check_pool
from triton_ops.int_groups import to_pool_dtype
from triton_ops.int_groups.cpu_scalars import BFLOAT16, FLOAT16, FLOAT32

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Pool types that have CPU kernels, and their names there."""


class EncodeError(ValueError):
    """The rows cannot be encoded (a value is not finite, or too large); nothing usable was written."""


def exact_rows(position: int, num_rows: int) -> int:
    """How many of ``num_rows`` rows from absolute ``position`` on are among a sequence's first 4 tokens."""
    return min(num_rows, max(0, EXACT_TOKENS - position))


class Codec(ABC):
    """Rows of one pool <-> payload bytes. Immutable, safe to call from several threads, and releases the GIL.

    Args:
        pool: the buffers rows are read from and written to; contiguous, one device.
        rotary: how the model rotates keys, or None when that is not known; then keys are stored rotated.

    Raises:
        ValueError: a buffer disagrees with ``pool.layout``, or the codec cannot serve this layout.
    """

    name: str
    version: int
    profile_id: int = 0
    """Of the calibrated profile that payloads depend on; 0 where there is none."""
    fixed_size: bool = True
    """True when every payload has exactly :meth:`payload_limit` bytes."""
    takes_references: bool = False
    """True when rows can be coded as differences from those of other blocks."""
    takes_tokens: bool = False
    """True when rows are predicted from their tokens."""

    def __init__(self, pool: PoolRows, rotary: Rotary | None) -> None:
        check_pool(pool)
        if rotary is not None and not pool.layout.v_head_dim:
            raise ValueError("codec: latent rows are stored with their rotated channels as they are, without a rotary")
        if rotary is not None and rotary.rotary_dim > pool.layout.head_dim:
            raise ValueError(f"codec: rotary_dim {rotary.rotary_dim} exceeds head_dim {pool.layout.head_dim}")
        self.pool = pool
        self.layout = pool.layout
        self.rotary = rotary
        self.num_slots = len(pool.keys[0])
        self._on_cpu = pool.device.type == "cpu"
        # addresses for the CPU kernels; self.pool keeps the buffers alive
        self._key_buffers = np.array([buffer.data_ptr() for buffer in pool.keys], np.int64)
        self._value_buffers = np.array([buffer.data_ptr() for buffer in pool.values], np.int64)

    @property
    @abstractmethod
    def stores_rotated_keys(self) -> bool:
        """True when a payload decodes at the position it was encoded at only."""

    @abstractmethod
    def payload_limit(self, num_rows: int, num_exact: int) -> int:
        """Most bytes of a payload: a function of these integers and the layout, never of content."""

    @abstractmethod
    def _encode(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        out: np.ndarray,
        references: Sequence[OpenReference],
        tokens: np.ndarray | None,
    ) -> int: ...

    @abstractmethod
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
        """Check all of the payload that can be checked; what is returned writes its layers."""

    def encode(
        self,
        slots: torch.Tensor,
        position: int,
        num_exact: int,
        out: np.ndarray,
        references: Sequence[OpenReference] = (),
        tokens: np.ndarray | None = None,
    ) -> int:
        """Encode pool rows into ``out``; returns how many bytes of it are the payload.

        Args:
            slots: int64 ``[n]``, pool rows of consecutive tokens.
            position: absolute position of the first row.
            num_exact: rows at the front (0..4) to keep bit for bit, keys rotated as they are.
            out: uint8 ``[payload_limit(n, num_exact)]``, C-contiguous, overwritten.
            references: payloads of this codec and profile that rows may be coded as differences from, in order of
                preference; only where :attr:`takes_references`. What does not serve is left out.
            tokens: int64 ``[n]``, ids of the rows; what :attr:`takes_tokens` predicts its first layers from.

        Raises:
            EncodeError: a row holds a value that the format cannot represent; ``out`` is then unspecified.
            ValueError: an argument is not as above.
        """
        self._check_rows(slots, position, len(slots), num_exact)
        self._check_payload("out", out, self.payload_limit(len(slots), num_exact), exact=True)
        if references and not self.takes_references:
            raise ValueError(f"codec: {self.name} codes no differences from other blocks")
        self._check_tokens(tokens, len(slots))
        if out.ctypes.data % 16 == 0:
            return self._encode(slots, position, num_exact, out, references, tokens)
        aligned: np.ndarray = np.empty(len(out), np.uint8)
        used = self._encode(slots, position, num_exact, aligned, references, tokens)
        out[:used] = aligned[:used]
        return used

    def decode(
        self,
        payload: np.ndarray,
        num_rows: int,
        num_exact: int,
        start: int,
        stop: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[OpenReference] = (),
        tokens: np.ndarray | None = None,
    ) -> None:
        """Reconstruct rows ``start .. stop`` of a payload into the pool; takes and raises what :meth:`begin` does."""
        self.begin(payload, num_rows, num_exact, start, stop, slots, position, references, tokens).write_all()

    def begin(
        self,
        payload: np.ndarray,
        num_rows: int,
        num_exact: int,
        start: int,
        stop: int,
        slots: torch.Tensor,
        position: int,
        references: Sequence[OpenReference] = (),
        tokens: np.ndarray | None = None,
    ) -> LayerWriter:
        """Reconstruct rows ``start .. stop`` of a payload into the pool, layer by layer.

        All checks come first, so the writer that is returned never stops in the middle because of the payload.

        Args:
            payload: uint8, C-contiguous, what :meth:`encode` left of its ``out``; numbers are not checked.
            num_rows, num_exact: as at :meth:`encode`.
            start, stop: half-open row range, ``0 <= start <= stop <= num_rows``.
            slots: int64 ``[stop - start]``, where the rows go.
            position: absolute position of row 0 of the *payload* at its new place. Rows that were kept exact, and all
                rows when :attr:`stores_rotated_keys`, are right at their old position only.
            references: those that the payload names, in any order; more do no harm.
            tokens: int64 ``[num_rows]``, those that the payload was encoded with.

        Raises:
            ValueError: an argument is not as above; nothing is written. BlockDamaged where that is the payload or a
                reference.
        """
        if not 0 <= start <= stop <= num_rows:
            raise ValueError(f"codec: need 0 <= start <= stop <= {num_rows} rows, got {start}..{stop}")
        if len(slots) != stop - start:
            raise ValueError(f"codec: rows {start}..{stop} need {stop - start} slots, got {len(slots)}")
        self._check_rows(slots, position, num_rows, num_exact)
        self._check_tokens(tokens, num_rows)
        self._check_payload("payload", payload, self.payload_limit(num_rows, num_exact), exact=self.fixed_size)
        num_layers = self.layout.num_layers
        if start == stop:
            return LayerWriter(num_layers, lambda first, stop: None)
        if payload.ctypes.data % 16:
            payload = payload.copy()
        write = self._begin(payload, num_rows, num_exact, start, slots, position, references, tokens)
        return LayerWriter(num_layers, write)

    def warm_up(self) -> None:
        """Compile what encode and decode need, on a scratch pool of one layer; the real pool is not touched."""
        num_rows = EXACT_TOKENS + 2
        if self.rotary is not None:
            num_rows = min(num_rows, len(self.rotary.cos_sin))
        num_exact = min(EXACT_TOKENS, num_rows)
        layout = replace(self.layout, num_layers=1)
        shape = (num_rows, layout.kv_heads)
        keys = torch.zeros((*shape, layout.head_dim), dtype=layout.dtype, device=self.pool.device)
        values = torch.zeros((*shape, layout.v_head_dim), dtype=layout.dtype, device=self.pool.device)
        scratch = self._for_pool(PoolRows(layout, (keys,), (values,)))
        slots = torch.arange(num_rows, device=self.pool.device)
        payload: np.ndarray = np.empty(scratch.payload_limit(num_rows, num_exact), np.uint8)
        payload = payload[: scratch.encode(slots, 0, num_exact, payload)]
        scratch.decode(payload, num_rows, num_exact, 0, num_rows, slots, 0)

    def _for_pool(self, pool: PoolRows) -> Codec:
        """The same codec over another pool."""
        return type(self)(pool, self.rotary)

    def _check_rows(self, slots: torch.Tensor, position: int, num_rows: int, num_exact: int) -> None:
        if slots.dtype != torch.int64 or slots.ndim != 1:
            raise ValueError(f"codec: slots must be int64 [n], got {slots.dtype} {tuple(slots.shape)}")
        # on a GPU this would cost a synchronisation, and its own indexing checks bounds
        if slots.device.type == "cpu" and len(slots):
            low, high = (int(x) for x in torch.aminmax(slots))
            if low < 0 or high >= self.num_slots:
                raise ValueError(f"codec: slots must be in 0..{self.num_slots - 1}, got {low}..{high}")
        if position < 0:
            raise ValueError(f"codec: position must not be negative, got {position}")
        if not 0 <= num_exact <= min(EXACT_TOKENS, num_rows):
            raise ValueError(f"codec: num_exact must be in 0..{min(EXACT_TOKENS, num_rows)}, got {num_exact}")

    def _check_tokens(self, tokens: np.ndarray | None, num_rows: int) -> None:
        if tokens is not None and (tokens.dtype != np.int64 or tokens.shape != (num_rows,)):
            raise ValueError(f"codec: tokens must be int64 [{num_rows}], got {tokens.dtype} {tokens.shape}")

    def _check_payload(self, name: str, array: np.ndarray, limit: int, exact: bool) -> None:
        fits = len(array) == limit if exact else len(array) <= limit
        if array.dtype != np.uint8 or array.ndim != 1 or not fits or not array.flags.c_contiguous:
            size = limit if exact else f"at most {limit}"
            raise ValueError(f"codec: {name} must be contiguous uint8 [{size}], got {array.dtype} {array.shape}")


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """uint8 array to a tensor over the same bytes, read-only ones too (torch would warn); keep ``array`` alive."""
    if not len(array):
        return torch.empty(0, dtype=torch.uint8)
    alias = (ctypes.c_uint8 * len(array)).from_address(array.ctypes.data)
    return torch.from_numpy(np.frombuffer(alias, np.uint8))


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Any contiguous tensor as flat uint8 ``[bytes]``."""
    return rows.reshape(-1).view(torch.uint8)


def put_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """``buffer[slots] = rows``; as bytes where torch has no kernel for the dtype."""
    if buffer.dtype.itemsize == 1:
        buffer, rows = buffer.view(torch.uint8), rows.view(torch.uint8)
    buffer.index_copy_(0, slots, rows)


def to_pool(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 to the pool's dtype, to nearest even; float16 and float8 saturate instead of becoming infinite."""
    if dtype.itemsize == 1:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return to_pool_dtype(x, dtype)


def slot_indices(slots: torch.Tensor) -> np.ndarray:
    """Slots as the CPU kernels take them."""
    return slots.cpu().contiguous().numpy()
