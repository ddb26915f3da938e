"""From moments and sensitivities to a profile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_plt.calibration.fit import fit_units
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec.profile import Profile, ProfileInfo, QuantisedMatrix, UnitTransform

SCALES = {"dense": 1.24, "fast": 0.75, "hadamard": 0.6}
"""Quantiser steps of equal divergence, in steps of rounding: a trellis is finer for its step, the others coarser."""


def make_profile(
    info: ProfileInfo,
    moments: Moments,
    sensitivity: Callable[[range], torch.Tensor],
    on_unit: Callable[[int], None] = lambda unit: None,
) -> Profile:
    """Fit every unit of ``info`` and round it to what a profile stores.

    Args:
        sensitivity: Fisher information of the rows of a unit's layers.
    """
    plain = info.codec == "hadamard"
    weigh = (lambda unit: torch.diag(mean_by_kind(info, sensitivity(unit).diagonal()))) if plain else sensitivity
    fits = fit_units(
        moments, info.units, weigh, info.step, info.predicts, on_unit, info.token_layers, transforms=not plain
    )
    units = [
        UnitTransform(QuantisedMatrix.of(fit.weights), fit.bias.float(), QuantisedMatrix.of(fit.basis)) for fit in fits
    ]
    return Profile.make(info, units)


def mean_by_kind(info: ProfileInfo, channels: torch.Tensor) -> torch.Tensor:
    """Of a unit's ``channels`` ``[width]``, the mean over the keys, and over the values, of its layer for every one."""
    found = []
    for layer in channels.split(info.width):
        for kind in layer.split((info.kv_heads * info.head_dim, info.kv_heads * info.v_head_dim)):
            found.append(kind.mean().expand(len(kind)) if len(kind) else kind)
    return torch.cat(found)
