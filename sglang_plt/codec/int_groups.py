"""Codecs ``int8`` and ``int4``: asymmetric integer groups over un-rotated keys and over values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from sglang_plt.codec.base import KINDS, Codec, EncodeError, as_bytes, as_tensor, put_rows, slot_indices, to_pool
from sglang_plt.codec.layers import Write
from sglang_plt.codec.reference import OpenReference
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows
from triton_ops import int_groups
from triton_ops.int_groups.cpu_decode import decoder
from triton_ops.int_groups.cpu_encode import encode

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_RECORD_ALIGN = 16


class IntGroups(Codec):
    """``int8/1`` or ``int4/1``; the payload is laid out in FORMAT.md, the numbers in ``triton_ops.int_groups``.

    Args:
        bits: 4 or 8.
        kernels: False runs the torch path on a CPU too; it is the specification, and what a GPU and pools of float8 or
            latent rows run.

    Raises:
        ValueError: the pool is not of a floating-point type that we know; or ``int4`` with an odd head dim.
    """

    version = 1

    def __init__(self, pool: PoolRows, rotary: Rotary | None, bits: int, kernels: bool = True) -> None:
        super().__init__(pool, rotary)
        layout = self.layout
        self.name, self.bits, self.kernels = f"int{bits}", bits, kernels
        if layout.dtype not in (*KINDS, *_FLOAT8):
            raise ValueError(f"codec {self.name}: a {layout.dtype} pool is not supported; use codec raw")
        if bits == 4 and (layout.head_dim % 2 or layout.v_head_dim % 2):
            raise ValueError(
                f"codec int4: head dims must be even, got {layout.head_dim} and {layout.v_head_dim}; use codec int8"
            )
        rotation = (rotary.rotary_dim, rotary.is_neox) if rotary is not None else (0, True)
        dims = (layout.head_dim, layout.v_head_dim, *rotation)
        self._use_kernels = kernels and self._on_cpu and layout.dtype in KINDS and layout.v_head_dim > 0
        if self._use_kernels:
            self._shape = (bits, KINDS[layout.dtype], layout.kv_heads, *dims)
            self._decode_rows = decoder(bits, KINDS[layout.dtype], *dims)

    @property
    def stores_rotated_keys(self) -> bool:
        return self.rotary is None

    def _for_pool(self, pool: PoolRows) -> IntGroups:
        return IntGroups(pool, self.rotary, self.bits, self.kernels)

    def _sections(self, num_rows: int, num_exact: int) -> list[int]:
        """Where the six sections of a layer record begin, then the record's length (see FORMAT.md)."""
        layout = self.layout
        rows = num_rows - num_exact
        k, v = layout.kv_heads * layout.head_dim, layout.kv_heads * layout.v_head_dim
        sizes = (
            num_exact * k * layout.dtype.itemsize,
            num_exact * v * layout.dtype.itemsize,
            -(-rows // int_groups.GROUP) * 2 * k * 2,
            rows * layout.kv_heads * 2 * 2 if v else 0,
            rows * k * self.bits // 8,
            rows * v * self.bits // 8,
        )
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + size)
        offsets[-1] = -(-offsets[-1] // _RECORD_ALIGN) * _RECORD_ALIGN
        return offsets

    def payload_limit(self, num_rows: int, num_exact: int) -> int:
        return self.layout.num_layers * self._sections(num_rows, num_exact)[-1]

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
        if not self._use_kernels:
            self._encode_torch(slots, position, num_exact, out)
            return len(out)
        sections = np.array(self._sections(len(slots), num_exact), np.int64)
        out[:] = 0  # the padding
        table = self._table(position, len(slots), inverse=True)
        rows, buffers = slot_indices(slots), (self._key_buffers, self._value_buffers, self.num_slots)
        failed = encode(out, out.view(np.uint16), sections, *buffers, rows, table, num_exact, *self._shape)
        if failed:
            raise EncodeError(f"codec {self.name}: layer {failed - 1} holds a value not finite or beyond 65504")
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
        offsets = self._sections(num_rows, num_exact)
        if not self._use_kernels:
            slots = slots.to(self.pool.device)

            def write(first: int, stop: int) -> None:
                for layer in range(first, stop):
                    self._write_torch(layer, payload, offsets, num_rows, num_exact, start, slots, position)

            return write
        payload = payload.view()
        payload.flags.writeable = False  # one compiled variant
        sections, rows = np.array(offsets, np.int64), slot_indices(slots)
        table, heads = self._table(position + start, len(slots), inverse=False), self.layout.kv_heads

        def run(first: int, stop: int) -> None:
            records = payload[first * offsets[-1] : stop * offsets[-1]]
            buffers = self._key_buffers[first:stop], self._value_buffers[first:stop], self.num_slots
            self._decode_rows(
                records, records.view(np.uint16), sections, *buffers, rows, table, start, num_exact, heads
            )

        return run

    def _table(self, position: int, num_rows: int, inverse: bool) -> np.ndarray:
        if self.rotary is None:
            return np.zeros((1, 1), np.float32)
        table = self.rotary.window(position, num_rows)
        return self.rotary.inverse_table(table) if inverse else table

    def _encode_torch(self, slots: torch.Tensor, position: int, num_exact: int, out: np.ndarray) -> None:
        target, at = as_tensor(out), 0
        record_bytes = self._sections(len(slots), num_exact)[-1]
        slots = slots.to(self.pool.device)
        positions = torch.arange(position + num_exact, position + len(slots), device=slots.device)
        for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
            k, v = keys[slots], values[slots]
            kept = k[num_exact:].float()
            if self.rotary is not None:
                kept = self.rotary.undo(kept, positions)
            try:
                key_params, key_codes = int_groups.encode_keys(kept, self.bits)
                value_params, value_codes = self._encode_values(v[num_exact:].float())
            except int_groups.NotEncodable as error:
                raise EncodeError(f"codec {self.name}: layer {layer}: {error}") from error
            parts = (k[:num_exact], v[:num_exact], key_params, value_params, key_codes, value_codes)
            record = torch.cat([as_bytes(part) for part in parts])
            target[at : at + len(record)].copy_(record)
            target[at + len(record) : at + record_bytes] = 0
            at += record_bytes

    def _encode_values(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and codes; both empty for latent rows."""
        return int_groups.encode_values(values, self.bits) if values.shape[-1] else (values, values)

    def _write_torch(
        self,
        layer: int,
        payload: np.ndarray,
        sections: list[int],
        num_rows: int,
        num_exact: int,
        start: int,
        slots: torch.Tensor,
        position: int,
    ) -> None:
        layout, bits, device = self.layout, self.bits, self.pool.device
        k_shape, v_shape = (layout.kv_heads, layout.head_dim), (layout.kv_heads, layout.v_head_dim)
        k_code_bytes, v_code_bytes = layout.head_dim * bits // 8, layout.v_head_dim * bits // 8
        half, num_coded, stop = torch.float16, num_rows - num_exact, start + len(slots)
        first, last = max(start - num_exact, 0), max(stop - num_exact, 0)  # quantised rows to decode
        num_kept = max(min(stop, num_exact) - start, 0)  # exact rows to copy
        record = as_tensor(payload)[layer * sections[-1] : (layer + 1) * sections[-1]].to(device)
        parts = [record[a:b] for a, b in pairwise(sections)]
        parts[5] = parts[5][: num_coded * layout.kv_heads * v_code_bytes]  # without the padding
        exact_k = parts[0].view(layout.dtype).view(num_exact, *k_shape)[start : start + num_kept]
        exact_v = parts[1].view(layout.dtype).view(num_exact, *v_shape)[start : start + num_kept]
        key_params = parts[2].view(half).view(-1, 2, *k_shape)
        value_params = parts[3].view(half).view(-1, layout.kv_heads, 2)[first:last]
        key_codes = parts[4].view(num_coded, layout.kv_heads, k_code_bytes)[first:last]
        value_codes = parts[5].view(num_coded, layout.kv_heads, v_code_bytes)[first:last]
        k = int_groups.decode_keys(key_params, key_codes, bits, first)
        if self.rotary is not None:
            positions = torch.arange(position + num_exact + first, position + num_exact + last, device=device)
            k = self.rotary.apply(k, positions)
        put_rows(self.pool.keys[layer], slots, torch.cat((exact_k, to_pool(k, layout.dtype))))
        if layout.v_head_dim:
            v = int_groups.decode_values(value_params, value_codes, bits)
            put_rows(self.pool.values[layer], slots, torch.cat((exact_v, to_pool(v, layout.dtype))))
