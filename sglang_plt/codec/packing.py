"""How the components of a transform become bytes: ``entropy`` for the fewest, ``fixed`` width for speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_plt.codec import entropy

MAX_CODE = 32767


class Packing(ABC):
    """Quantises components, in units of the step, and packs what it stored of them."""

    name: str

    @abstractmethod
    def quantise(self, components: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """``(stored, what the decoder will have)`` of one unit's components, float32 ``[rows, n]``."""

    @abstractmethod
    def pack(self, stored: Sequence[Any]) -> bytes:
        """The bytes of all units of a block."""

    @abstractmethod
    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[Any]:
        """Inverse of :meth:`pack`, for units of ``widths`` components.

        Raises:
            ValueError: ``data`` does not hold that.
        """

    @abstractmethod
    def dequantise(self, stored: Any, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Rows ``start .. stop`` of one unit's components, float32 ``[stop - start, n]``."""


class Entropy(Packing):
    """Whole steps, coded by :mod:`sglang_plt.codec.entropy`. Stored: int16 ``[components, rows]``, padded to bands."""

    name = "entropy"

    def quantise(self, components: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        codes = components.round().clamp_(-MAX_CODE, MAX_CODE)
        stored = codes.T.to(torch.int16).cpu().numpy()
        short = -len(stored) % entropy.BAND
        return (np.pad(stored, ((0, short), (0, 0))) if short else stored), codes

    def pack(self, stored: Sequence[np.ndarray]) -> bytes:
        return entropy.encode(np.concatenate(stored))

    def unpack(self, data: memoryview, widths: Sequence[int], rows: int) -> list[np.ndarray]:
        padded = [-(-width // entropy.BAND) * entropy.BAND for width in widths]
        codes = entropy.decode(data, sum(padded), rows)
        ends = np.cumsum(padded)
        return [codes[end - size : end - size + width] for end, size, width in zip(ends, padded, widths, strict=True)]

    def dequantise(self, stored: np.ndarray, start: int, stop: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(stored[:, start:stop]).to(device).float().T
