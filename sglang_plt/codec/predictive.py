"""Codecs ``dense`` and ``fast``: every layer is predicted from the layer below, the rest transformed and quantised.

The prediction reads what the decoder will have (closed loop), so errors do not add up over layers. See
:mod:`sglang_plt.calibration.fit` for the numbers and FORMAT.md for the bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from sglang_plt.codec.base import Codec, as_bytes, put_rows, to_pool
from sglang_plt.codec.int_groups import IntGroups
from sglang_plt.codec.packing import LARGEST, PACKINGS
from sglang_plt.codec.profile import Profile
from sglang_plt.codec.rope import Rotary
from sglang_plt.codec.rows import PoolRows, layer_rows
from triton_ops.band_codes import BAND

_HEAD = struct.Struct("<HHf")  # mode, escaped rows, steps of the profile in a step of this block
_CODED, _FALLBACK = 0, 1
_LARGEST = 65504.0  # larger rows, and those not finite, are kept in float32


@dataclass(frozen=True)
class _Unit:
    """float32 on the pool's device: ``row = bias + below @ weights + components @ basis``, analysis inverts basis."""

    layers: range
    weights: torch.Tensor
    bias: torch.Tensor
    basis: torch.Tensor
    analysis: torch.Tensor


class Predictive(Codec):
    """Codec of a :class:`Profile`; what its profile does not fit is stored as ``int8``, a block at a time.

    Args:
        profile: names the codec, ``fast`` or ``dense``, and with it the packing.
        scale: steps of the profile in a step of the quantiser; half of it means a quarter of the divergence.

    Raises:
        ValueError: the profile was made for other rows, or cannot be used.
    """

    version = 1
    fixed_size = False

    def __init__(self, pool: PoolRows, rotary: Rotary | None, profile: Profile, scale: float) -> None:
        super().__init__(pool, rotary)
        if profile.info.codec not in PACKINGS:
            raise ValueError(f"profile: its codec {profile.info.codec!r} is none of {', '.join(PACKINGS)}")
        self.name, self.profile, self.scale = profile.info.codec, profile, float(np.float32(scale))
        self.packing = PACKINGS[self.name]
        self.profile_id = profile.id
        self._fallback = IntGroups(pool, rotary, 8)
        info, layout = profile.info, self.layout
        shape = (layout.num_layers, layout.kv_heads, layout.head_dim, layout.v_head_dim, rotary is None)
        if (info.num_layers, info.kv_heads, info.head_dim, info.v_head_dim, info.keys_rotated) != shape:
            raise ValueError(f"codec {self.name}: the profile is of other rows than {layout}")
        self._key_width = layout.kv_heads * layout.head_dim
        self._units = [
            _Unit(
                layers,
                unit.weights.dense().to(pool.device),
                unit.bias.to(pool.device),
                (basis := unit.basis.dense()).to(pool.device),
                _inverse(basis, layers).to(pool.device),
            )
            for layers, unit in zip(info.units, profile.units, strict=True)
        ]

    @property
    def stores_rotated_keys(self) -> bool:
        return self.rotary is None

    def warm_up(self) -> None:
        super().warm_up()
        self.packing.warm_up()

    def _for_pool(self, pool: PoolRows) -> Codec:
        return self._fallback._for_pool(pool)  # the profile is of all layers

    def payload_limit(self, num_rows: int, num_exact: int) -> int:
        return _HEAD.size + self._fallback.payload_limit(num_rows, num_exact)

    # -- encoding -------------------------------------------------------------------------------------------------

    def _encode(self, slots: torch.Tensor, position: int, num_exact: int, out: np.ndarray) -> int:
        if self.rotary is not None:
            self.rotary.check_positions(position, len(slots))
        coded = self._coded(slots, position, num_exact)
        if len(coded) <= len(out):
            out[: len(coded)] = np.frombuffer(coded, np.uint8)
            return len(coded)
        used = self._fallback.encode(slots, position, num_exact, out[_HEAD.size :])
        out[: _HEAD.size] = np.frombuffer(_HEAD.pack(_FALLBACK, 0, 1.0), np.uint8)
        return _HEAD.size + used

    def _coded(self, slots: torch.Tensor, position: int, num_exact: int) -> bytes:
        """The payload of mode 0, however long."""
        slots = slots.to(self.pool.device)
        parts = [
            as_bytes(buffer[slots[:num_exact]]).cpu().numpy().tobytes()
            for buffers in zip(self.pool.keys, self.pool.values, strict=True)
            for buffer in buffers
        ]
        slots, position = slots[num_exact:], position + num_exact
        if not len(slots):
            return b"".join((_HEAD.pack(_CODED, 0, self.scale), *parts))
        rows = layer_rows(self.pool, self.rotary, slots, position)
        escaped = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        for row in rows:
            escaped |= ~(row.abs().amax(1) <= _LARGEST)  # true for NaN
        stored = []
        below: torch.Tensor | None = None
        for unit in self._units:
            predicted = self._predict(unit, below)
            row = torch.cat(rows[unit.layers.start : unit.layers.stop], 1)
            components = (row - predicted) @ unit.analysis / self.scale
            escaped |= ~(components.abs().amax(1) <= LARGEST)
            components[escaped] = 0
            codes, kept = self.packing.quantise(components)
            stored.append(codes)
            below = torch.addmm(predicted, kept, unit.basis, alpha=self.scale)[:, -self._width :]
        where = escaped.nonzero().flatten()
        parts.append(where.to(torch.uint8).cpu().numpy().tobytes())
        parts += [row[where].cpu().numpy().tobytes() for row in rows] if len(where) else []
        return b"".join((_HEAD.pack(_CODED, len(where), self.scale), *parts, self.packing.pack(stored)))

    # -- decoding -------------------------------------------------------------------------------------------------

    def _decode(
        self, payload: np.ndarray, num_rows: int, num_exact: int, start: int, slots: torch.Tensor, position: int
    ) -> None:
        if self.rotary is not None:
            self.rotary.check_positions(position + start, len(slots))
        mode, num_escaped, scale = _HEAD.unpack_from(payload.data)
        if mode == _FALLBACK:
            inside = payload[_HEAD.size :]
            self._fallback.decode(inside, num_rows, num_exact, start, start + len(slots), slots, position)
            return
        slots = slots.to(self.pool.device)
        at = self._restore_exact(payload, num_exact, start, slots)
        first, last = max(start - num_exact, 0), start + len(slots) - num_exact  # coded rows
        if last <= first:
            return
        slots = slots[max(num_exact - start, 0) :]
        escaped = torch.from_numpy(payload[at : at + num_escaped].astype(np.int64))
        at += num_escaped
        size = 4 * num_escaped * self._width
        exceptions = [payload[at + layer * size : at + (layer + 1) * size] for layer in range(self.layout.num_layers)]
        at += self.layout.num_layers * size
        widths = [len(unit.bias) for unit in self._units]
        codes = self.packing.unpack(payload[at:].data, widths, num_rows - num_exact)
        inside = (escaped >= first) & (escaped < last)
        below: torch.Tensor | None = None
        for unit, stored in zip(self._units, codes, strict=True):
            kept, used = self.packing.dequantise(stored, first, last, self.pool.device)
            if len(unit.basis) % BAND:
                kept, used = kept[:, used < len(unit.basis)], used[used < len(unit.basis)]
            basis = unit.basis if len(used) == len(unit.basis) else unit.basis[used]
            row = torch.addmm(self._predict(unit, below), kept, basis, alpha=scale)
            below = row[:, -self._width :]
            for part, layer in zip(row.split(self._width, 1), unit.layers, strict=True):
                if num_escaped and bool(inside.any()):
                    values = torch.from_numpy(exceptions[layer].copy().view(np.float32)).view(num_escaped, -1)
                    part = part.clone()
                    part[(escaped[inside] - first).to(part.device)] = values[inside].to(part.device)
                self._scatter(layer, part, slots, position + num_exact + first)

    def _restore_exact(self, payload: np.ndarray, num_exact: int, start: int, slots: torch.Tensor) -> int:
        """Write the exact rows that are wanted; returns where the payload goes on."""
        at, count = _HEAD.size, max(0, min(num_exact - start, len(slots)))
        for buffers in zip(self.pool.keys, self.pool.values, strict=True):
            for buffer in buffers:
                row_bytes = buffer[0].numel() * buffer.element_size()
                if count and row_bytes:
                    section = payload[at + start * row_bytes : at + (start + count) * row_bytes].copy()
                    rows = torch.from_numpy(section).view(buffer.dtype).view(count, *buffer.shape[1:])
                    put_rows(buffer, slots[:count], rows.to(buffer.device))
                at += num_exact * row_bytes
        return at

    def _scatter(self, layer: int, rows: torch.Tensor, slots: torch.Tensor, position: int) -> None:
        layout = self.layout
        keys = rows[:, : self._key_width].reshape(len(rows), layout.kv_heads, layout.head_dim)
        values = rows[:, self._key_width :].reshape(len(rows), layout.kv_heads, layout.v_head_dim)
        if self.rotary is not None:
            keys = self.rotary.apply(keys, torch.arange(position, position + len(slots), device=slots.device))
        for buffer, part in ((self.pool.keys[layer], keys), (self.pool.values[layer], values)):
            put_rows(buffer, slots, to_pool(part, layout.dtype))

    # -- both -----------------------------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return self.profile.info.width

    def _predict(self, unit: _Unit, below: torch.Tensor | None) -> torch.Tensor:
        return unit.bias if below is None or not len(unit.weights) else torch.addmm(unit.bias, below, unit.weights)


def _inverse(basis: torch.Tensor, layers: range) -> torch.Tensor:
    """float32 ``[n, n]``; refuses a basis that has none, which no calibration makes."""
    inverse, failed = torch.linalg.inv_ex(basis.double())
    if int(failed) or not bool(inverse.float().isfinite().all()):
        raise ValueError(f"profile: the basis of layers {layers.start} to {layers.stop - 1} has no inverse")
    return inverse.float()
