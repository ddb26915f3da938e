"""From moments and sensitivities to a profile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_plt.calibration.fit import fit_units
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec.profile import Profile, ProfileInfo, QuantisedMatrix, UnitTransform

SCALES = {"dense": 1.24, "fast": 0.75}
"""Quantiser steps of equal divergence, in steps of rounding: a trellis is finer for its step, fixed widths coarser."""


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
    fits = fit_units(moments, info.units, sensitivity, info.step, info.predicts, on_unit, info.token_layers)
    units = [
        UnitTransform(QuantisedMatrix.of(fit.weights), fit.bias.float(), QuantisedMatrix.of(fit.basis)) for fit in fits
    ]
    return Profile.make(info, units)
