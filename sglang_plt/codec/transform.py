"""The arithmetic of a profile: predict a unit's rows from the layer below, to components and back."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from sglang_plt.codec.products import chosen_rows, product
from sglang_plt.codec.profile import Profile
from triton_ops.band_codes import BAND


@dataclass(frozen=True)
class Unit:
    """``row = bias + below @ weights + features @ of_tokens + components @ basis``, float32.

    Attributes:
        layers: of the unit.
        weights: ``[width below, width]``; no rows where nothing is predicted.
        of_tokens: ``[hidden, width]``; no rows where tokens predict nothing.
        bias: ``[width]``.
        basis: ``[width, width]``, one component a row.
        analysis: its inverse.
    """

    layers: range
    weights: torch.Tensor
    of_tokens: torch.Tensor
    bias: torch.Tensor
    basis: torch.Tensor
    analysis: torch.Tensor

    def predict(self, below: torch.Tensor | None, features: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the unit, ``[n, width]`` or ``[width]``.

        Args:
            below: rows of the layer below as the decoder has them; None in the first unit.
            features: of the rows' tokens, float32 ``[n, hidden]``, where they are known.
        """
        found = self.bias
        if below is not None and len(self.weights):
            found = product(below, self.weights, found)
        if features is not None and len(self.of_tokens):
            found = product(features, self.of_tokens, found)
        return found

    def analyse(self, rows: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        """Components ``[n, width]``, in steps of the profile."""
        return product(rows - predicted, self.analysis)

    def synthesise(
        self, predicted: torch.Tensor, components: torch.Tensor, used: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows ``[n, width]``.

        Args:
            components: in steps of the profile; all, or the ``used`` ones in this order. Padding of bands is ignored.
        """
        basis = self.basis
        if used is not None:
            if len(basis) % BAND:
                components, used = components[:, used < len(basis)], used[used < len(basis)]
            basis = basis if len(used) == len(basis) else chosen_rows(basis, used)
        return product(components, basis, predicted)


_units: OrderedDict[tuple[int, str], list[Unit]] = OrderedDict()
_MOST_PROFILES = 12
_lock = threading.Lock()


def units_of(profile: Profile, device: torch.device) -> list[Unit]:
    """Of all units, the inverses computed; those of recent profiles are shared, whoever asks.

    Raises:
        ValueError: a basis has no inverse, which no calibration makes.
    """
    key = profile.id, str(device)
    with _lock:
        if key not in _units:
            _units[key] = _make_units(profile, device)
            if len(_units) > _MOST_PROFILES:
                _units.popitem(last=False)
        _units.move_to_end(key)
        return _units[key]


def _make_units(profile: Profile, device: torch.device) -> list[Unit]:
    found = []
    for layers, unit in zip(profile.info.units, profile.units, strict=True):
        basis = unit.basis.dense()
        analysis, failed = torch.linalg.inv_ex(basis.double())
        if int(failed) or not bool(analysis.float().isfinite().all()):
            raise ValueError(f"profile: the basis of layers {layers.start} to {layers.stop - 1} has no inverse")
        weights, hidden = unit.weights.dense(), profile.info.hidden_of(layers)
        parts = weights[hidden:], weights[:hidden], unit.bias, basis, analysis.float()
        found.append(Unit(layers, *(part.to(device).contiguous() for part in parts)))
    return found
