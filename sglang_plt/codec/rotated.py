"""Rotated Lloyd-Max codes as a packing: what TurboQuant does to rows, done to what a prediction leaves of them.

A profile for it has no transform but a scale a layer and kind (keys, values) from their sensitivities. The packing
turns each half of a unit's components by a randomised Hadamard matrix and stores Lloyd-Max levels, with as many bits as
bring the error of these rows to that of rounding, so that bits follow sensitivity and what there is to code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_plt.codec.packing import Packing
from triton_ops.rotated import code_bytes, decode, encode
from triton_ops.rotated.levels import DISTORTION
from triton_ops.rotated.reference import BITS, NORM_MAX

_LARGEST_ERROR = 1 / 6
"""Squared steps: a bit is a factor of 4, so that the error is a twelfth, that of rounding, in the geometric mean."""
_NORM: np.dtype = np.dtype("<f2")


@dataclass(frozen=True)
class Half:
    """One half of a unit's components.

    Attributes:
        width: components.
        bits: a code, 0 to 8; with 0 all components are 0.
        norms: float16 ``[rows, 1]``; no rows with 0 bits.
        codes: uint8 ``[rows, 1, bytes]``; likewise.
    """

    width: int
    bits: int
    norms: torch.Tensor
    codes: torch.Tensor

    def components(self, start: int, stop: int) -> torch.Tensor:
        """float32 ``[stop - start, width]``."""
        if not self.bits:
            return torch.zeros(stop - start, self.width)
        return decode(self.norms[start:stop], self.codes[start:stop], self.bits, self.width)[:, 0]


def halves_of(width: int) -> tuple[int, ...]:
    """Widths of the parts that are turned apart: of a unit of one layer its keys and its values, where these agree."""
    return (width - width // 2, width // 2) if width > 1 else (width,)


class RotatedLloydMax(Packing):
    """Stored: the halves of a unit. The codes of ``triton_ops.rotated`` specify the numbers."""

    name = "rotated"
    quiet_zone = 1.4
    difference_step = 1.0

    def fits(self, components: torch.Tensor) -> torch.Tensor:
        return super().fits(components) & (components.norm(dim=1) <= 0.99 * NORM_MAX)

    def quantise(self, components: torch.Tensor) -> tuple[list[Half], torch.Tensor]:
        stored = [self._half(part) for part in components.cpu().split(halves_of(components.shape[1]), 1)]
        kept = torch.cat([half.components(0, len(components)) for half in stored], 1)
        return stored, kept.to(components.device)

    @staticmethod
    def _half(part: torch.Tensor) -> Half:
        square = float(part.pow(2).mean())
        bits = next((b for b in (0, *BITS) if DISTORTION[b] * square <= _LARGEST_ERROR), BITS[-1])
        if not bits:
            nothing = torch.empty(0, 1, dtype=torch.float16), torch.empty(0, 1, 0, dtype=torch.uint8)
            return Half(part.shape[1], 0, *nothing)
        return Half(part.shape[1], bits, *encode(part.contiguous().unsqueeze(1), bits))

    def pack(self, stored: Sequence[list[Half]]) -> bytes:
        halves = [half for unit in stored for half in unit]
        parts = [bytes(half.bits for half in halves)]
        for half in halves:
            parts += [half.norms.numpy().astype(_NORM).tobytes(), half.codes.numpy().tobytes()]
        return b"".join(parts)

    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[list[Half]]:
        parts = [halves_of(width) for width in widths]
        number = sum(map(len, parts))
        bits, at, found = iter(np.frombuffer(data, np.uint8, number).tolist()), number, []
        for unit in parts:
            halves = []
            for width in unit:
                b = next(bits)
                if b > BITS[-1]:
                    raise ValueError(f"rotated: codes of {b} bits")
                count = rows if b else 0
                size = code_bytes(width, b) if b else 0
                norms = np.frombuffer(data, _NORM, count, at).astype(np.float16)
                codes = np.frombuffer(data, np.uint8, count * size, at + 2 * count).reshape(count, 1, size)
                at += count * (2 + size)
                if not np.isfinite(norms).all() or (norms < 0).any():
                    raise ValueError("rotated: a length is negative or not finite")
                halves.append(Half(width, b, torch.from_numpy(norms)[:, None], torch.from_numpy(codes.copy())))
            found.append(halves)
        if at != len(data):
            raise ValueError(f"rotated: {len(data)} bytes, the codes take {at}")
        return found

    def dequantise(
        self, stored: list[Half], start: int, stop: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ends = np.cumsum([half.width for half in stored])
        used = [(half, int(end) - half.width) for half, end in zip(stored, ends, strict=True) if half.bits]
        if not used:
            return torch.empty(stop - start, 0, device=device), torch.empty(0, dtype=torch.int64, device=device)
        values = torch.cat([half.components(start, stop) for half, _ in used], 1)
        where = torch.cat([torch.arange(first, first + half.width) for half, first in used])
        return values.to(device), where.to(device)

    def warm_up(self) -> None:
        """Nothing is compiled."""
