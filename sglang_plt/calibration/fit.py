"""Fits one affine predictor and one Karhunen-Loeve transform a unit, in closed loop, from second moments alone.

A unit is one layer or a few neighbours, keys and values together. The decoder predicts it from what it has of the layer
below, rows with quantisation error, so predictors are fitted to such rows. Their error need not be simulated: in the
coordinates of the transform it is white, 1/12 of a squared step where a component is coded and the component's own
variance where it never is (the test channel of reverse water-filling), hence its covariance is known as soon as the
transform of the unit below is.

Weighting rows by the square root of their Fisher information before the transform makes one step size right for all
components: an error of one step then costs the same divergence anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sglang_plt.calibration.moments import Moments

_RIDGE = 1e-5
_STEP_NOISE = 1 / 12


@dataclass(frozen=True)
class UnitFit:
    """``predicted = bias + below @ weights``; ``row = predicted + codes @ basis``; float64.

    Attributes:
        weights: ``[inputs, width]``; of the tokens' features, where they predict this unit, then of the layer below.
        bias: ``[width]``.
        basis: ``[width, width]``, one component a row, in units of the quantiser's step, largest variance first.
        analysis: ``[width, width]``, its inverse: ``codes = round((row - predicted) @ analysis)``.
        sigma: ``[width]``, standard deviation of every component, in steps.
    """

    weights: torch.Tensor
    bias: torch.Tensor
    basis: torch.Tensor
    analysis: torch.Tensor
    sigma: torch.Tensor


def fit_units(
    moments: Moments,
    units: Sequence[range],
    sensitivity: Callable[[range], torch.Tensor],
    step: float,
    predicts: bool = True,
    on_unit: Callable[[int], None] = lambda unit: None,
    token_layers: int = 0,
    transforms: bool = True,
) -> Iterator[UnitFit]:
    """Yield the fit of every unit, from the first to the last.

    Args:
        units: the layers of every unit, in order.
        sensitivity: of a unit, the symmetric positive Fisher information ``[width, width]`` of its rows.
        step: quantiser step in weighted coordinates; see :func:`step_for`.
        predicts: False leaves the prediction out: a unit is coded as its distance from the mean.
        token_layers: units that begin below this layer are predicted from token features too.
        transforms: False takes no eigenvectors: components are channels in units of the step.
    """
    noise = torch.zeros(0, 0, dtype=torch.float64)
    for number, unit in enumerate(units):
        below_mean, mean, xx, xy, yy = moments.covariances(unit, tokens=unit.start < token_layers)
        if not len(xx) or not predicts:
            weights, residual, below_mean = xy[:0], yy, below_mean[:0]
        else:
            noisy = xx.clone()
            noisy[len(xx) - len(noise) :, len(xx) - len(noise) :] += noise
            ridge = _RIDGE * noisy.diagonal().mean() * torch.eye(len(noisy), dtype=torch.float64)
            weights = torch.linalg.solve(noisy + ridge, xy)
            cross = weights.T @ xy
            residual = yy - cross - cross.T + weights.T @ noisy @ weights
        root, inverse_root = _roots(sensitivity(unit).double())
        weighted = root @ residual @ root
        if transforms:
            variance, vectors = torch.linalg.eigh(weighted)
            variance, vectors = variance.flip(0), vectors.flip(1)
        else:
            variance, vectors = weighted.diagonal(), torch.eye(len(weighted), dtype=torch.float64)
        variance = variance.clamp_min(0) / step**2
        basis = step * vectors.T @ inverse_root
        last = basis[:, -moments.width :]  # the layer that the next unit is predicted from
        noise = last.T @ (variance.clamp_max(_STEP_NOISE)[:, None] * last)
        yield UnitFit(weights, mean - below_mean @ weights, basis, root @ vectors / step, variance.sqrt())
        on_unit(number)


def step_for(divergence: float, num_layers: int, width: int) -> float:
    """The step at which errors in ``num_layers * width`` components move next-token distributions by ``divergence``.

    To second order KL = 1/2 e^T F e for an error ``e`` in rows of Fisher information ``F``; in weighted coordinates
    every component contributes half the squared error of rounding, step**2 / 24.
    """
    return (24 * divergence / (num_layers * width)) ** 0.5


def _roots(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    root = values.clamp_min(values[-1] * 1e-9).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T
