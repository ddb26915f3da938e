"""Moments against NumPy, the fit against a simulated closed loop, sensitivities."""

import numpy as np
import pytest
import torch

from sglang_plt.calibration.fit import fit_units, step_for
from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.calibration.sensitivity import Fisher
from sglang_plt.codec import ProfileInfo
from sglang_plt.codec.profile import unit_layers
from tests.codec.correlated import Source

SOURCE = Source(layers=6, heads=1, dim=6, v_dim=4)
WIDTH = SOURCE.width
EYE = torch.eye(WIDTH, dtype=torch.float64)


def identity(unit: range) -> torch.Tensor:
    return torch.eye(len(unit) * WIDTH, dtype=torch.float64)


def moments_of(rows: list[torch.Tensor], group: int = 1, parts: int = 3) -> Moments:
    moments = Moments(len(rows), WIDTH, group)
    for part in range(parts):
        moments.add([row[part::parts] for row in rows])
    return moments


# -- moments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 4, 6, 9])
def test_covariances_are_those_of_numpy(group):
    rows = SOURCE.rows(500, 1)
    moments = moments_of(rows, group)
    assert moments.count == 500
    x = np.concatenate([row.double().numpy() for row in rows], axis=1)
    mean, covariance = x.mean(0), np.cov(x.T, bias=True)
    for unit in unit_layers(6, group):
        for start in unit:
            for stop in range(start + 1, unit.stop + 1):  # every part of a unit
                below = slice(max(start - 1, 0) * WIDTH, start * WIDTH)
                inside = slice(start * WIDTH, stop * WIDTH)
                want = (
                    mean[below],
                    mean[inside],
                    covariance[below, below],
                    covariance[below, inside],
                    covariance[inside, inside],
                )
                for found, expected in zip(moments.covariances(range(start, stop)), want, strict=True):
                    assert found.dtype == torch.float64
                    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3])
def test_token_features_stand_in_front_of_the_layer_below(group):
    rows, features = SOURCE.rows(300, 1), torch.randn(300, 5, generator=torch.Generator().manual_seed(2))
    moments = Moments(6, WIDTH, group, hidden=5, token_layers=2)
    for part in range(3):
        moments.add([row[part::3] for row in rows], features[part::3])
    plain = moments_of(rows, group)
    assert Moments.num_bytes(6, WIDTH, group, 5, 2) == sum(8 * sums.numel() for sums in moments.sums)
    x = torch.cat([features, *rows], 1).double().numpy()
    mean, covariance = x.mean(0), np.cov(x.T, bias=True)
    for unit in moments.units:
        for found, expected in zip(moments.covariances(unit), plain.covariances(unit), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        hidden = 5 if unit.start < 2 else 0
        where = [*range(hidden), *range(5 + max(unit.start - 1, 0) * WIDTH, 5 + unit.start * WIDTH)]
        inside = slice(5 + unit.start * WIDTH, 5 + unit.stop * WIDTH)
        below_mean, _, xx, xy, _ = moments.covariances(unit, tokens=True)
        np.testing.assert_allclose(below_mean.numpy(), mean[where], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(xx.numpy(), covariance[where][:, where], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(xy.numpy(), covariance[where, inside], rtol=1e-5, atol=1e-5)


def test_what_tokens_say_needs_no_components():
    features = torch.randn(3000, 8, generator=torch.Generator().manual_seed(3))
    rows = SOURCE.rows(3000, 1)
    rows[0] += 20 * features @ torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
    moments = Moments(6, WIDTH, 1, hidden=8, token_layers=2)
    moments.add(rows, features)
    units = unit_layers(6, 1)
    without, given = (list(fit_units(moments, units, identity, 0.5, token_layers=layers)) for layers in (0, 2))
    assert [len(fit.weights) for fit in given] == [8, 8 + WIDTH, *4 * [WIDTH]]
    assert given[0].sigma.square().mean() < 0.05 * without[0].sigma.square().mean()
    alone = moments_of(SOURCE.rows(3000, 1))
    (first, *_) = fit_units(alone, units, identity, 0.5)
    torch.testing.assert_close(given[0].sigma, first.sigma, rtol=0.1, atol=0.05)


def test_large_means_do_not_drown_small_variances():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2000, WIDTH, generator=generator) * 0.05 + 300 for _ in range(2)]
    found = moments_of(rows).covariances(range(1, 2))[4].numpy()
    np.testing.assert_allclose(found, np.cov(rows[1].double().numpy().T, bias=True), rtol=1e-4, atol=1e-6)


def test_rows_that_are_not_finite_are_skipped():
    rows = SOURCE.rows(100, 1)
    want = moments_of([row[:90] for row in rows]).covariances(range(3, 4))
    rows[2][93, 1], rows[5][98, 0] = float("nan"), float("inf")
    moments = moments_of([row[:90] for row in rows])
    moments.add([row[[93, 98]] for row in rows])
    assert moments.count == 90
    for one, other in zip(moments.covariances(range(3, 4)), want, strict=True):
        assert torch.equal(one, other)
    moments.add([row[:0] for row in rows])
    assert moments.count == 90


def test_moments_refuse_what_they_cannot_answer():
    moments = moments_of(SOURCE.rows(10, 1), group=2)
    with pytest.raises(ValueError, match="no unit holds layers 1 to 2"):
        moments.covariances(range(1, 3))
    with pytest.raises(ValueError, match="1 rows are too few"):
        moments_of(SOURCE.rows(1, 1), parts=1).covariances(range(0, 1))
    assert Moments.num_bytes(6, WIDTH, 2) == sum(sums.nbytes for sums in moments.sums)


# -- the fit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predicts", [True, False])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_analysis_inverts_the_basis(group, predicts):
    moments, units = moments_of(SOURCE.rows(500, 1), group), unit_layers(6, group)
    mixed = [torch.randn(6, WIDTH, WIDTH, generator=torch.Generator().manual_seed(i)).double() for i in range(2)]
    weights = torch.block_diag(*(mixed[0] @ mixed[0].transpose(1, 2)))
    numbers: list[int] = []
    fits = list(
        fit_units(
            moments,
            units,
            lambda unit: weights[unit.start * WIDTH : unit.stop * WIDTH, unit.start * WIDTH : unit.stop * WIDTH],
            0.25,
            predicts,
            numbers.append,
        )
    )
    assert numbers == list(range(len(units)))
    for fit, unit in zip(fits, units, strict=True):
        width = len(unit) * WIDTH
        assert fit.weights.shape == (WIDTH if unit.start and predicts else 0, width)
        assert torch.allclose(fit.analysis @ fit.basis, torch.eye(width, dtype=torch.float64), atol=1e-6)
        assert (fit.sigma.diff() <= 0).all()
        # an error of one step costs alike in any component: basis F basis^T = step^2
        own = weights[unit.start * WIDTH : unit.stop * WIDTH, unit.start * WIDTH : unit.stop * WIDTH]
        cost = fit.basis @ own @ fit.basis.T
        assert torch.allclose(cost, 0.25**2 * torch.eye(width, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("group", "step"), [(1, 0.1), (1, 0.5), (2, 0.1), (3, 0.5)])
def test_sigma_is_that_of_a_simulated_closed_loop(group, step):
    rows = [row.double() for row in SOURCE.rows(6000, 1)]
    units = unit_layers(6, group)
    below = None
    for fit, unit in zip(fit_units(moments_of(SOURCE.rows(6000, 1), group), units, identity, step), units, strict=True):
        row = torch.cat(rows[unit.start : unit.stop], 1)
        predicted = fit.bias if below is None else fit.bias + below @ fit.weights
        components = (row - predicted) @ fit.analysis
        measured = components.std(0)
        # where components are about a step, rounding is not white noise of 1/12 as the fit takes it to be
        loose = 0.15 if step > 0.2 else 0.02
        assert torch.allclose(measured, fit.sigma, rtol=loose, atol=loose * 0.3)
        assert components.mean(0).abs().max() <= 0.2 * max(1.0, float(fit.sigma.max()) / 50)
        decoded = predicted + components.round() @ fit.basis
        assert (decoded - row).pow(2).mean().sqrt() <= step * 0.30
        below = decoded[:, -WIDTH:]


def test_moments_of_groups_hold_those_of_smaller_ones():
    rows = SOURCE.rows(500, 1)
    single = list(fit_units(moments_of(rows, 1), unit_layers(6, 1), identity, 0.25))
    for group in (2, 3, 6):
        fits = fit_units(moments_of(rows, group), unit_layers(6, 1), identity, 0.25)
        for one, other in zip(fits, single, strict=True):
            for name in ("weights", "bias", "sigma"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.basis.T @ one.basis, other.basis.T @ other.basis, rtol=1e-4, atol=1e-4)


def test_prediction_explains_what_it_can():
    units = unit_layers(6, 1)
    moments = moments_of(SOURCE.rows(4000, 1))
    with_, without = (list(fit_units(moments, units, identity, 0.05, predicts)) for predicts in (True, False))
    assert torch.equal(with_[0].sigma, without[0].sigma)
    for one, other in zip(with_[1:], without[1:], strict=True):
        assert one.sigma.pow(2).sum() < 0.02 * other.sigma.pow(2).sum()  # 10 % of noise is 1 % of variance


def test_step_gives_the_divergence():
    step = step_for(0.01, 6, WIDTH)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    information = mix @ mix.T
    moments = moments_of(SOURCE.rows(4000, 1))
    total = 0.0
    for fit in fit_units(moments, unit_layers(6, 1), lambda unit: information, step):
        error = (torch.rand(2000, WIDTH, generator=generator, dtype=torch.float64) - 0.5) @ fit.basis
        total += float(0.5 * ((error @ information) * error).sum(1).mean())
    assert total == pytest.approx(0.01, rel=0.02)


# -- sensitivities --------------------------------------------------------------------------------------------------


def test_information_is_block_diagonal_with_a_floor():
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(50, n, generator=generator) for _ in range(3)] for n in (6, 4))
    fisher = Fisher(3, 6, 4)
    fisher.add([x[:20] for x in keys], [x[:20] for x in values], 7)
    fisher.add([x[20:] for x in keys], [x[20:] for x in values], 5)
    assert fisher.tokens == 12
    found = fisher.of_layers(range(1, 3))
    blocks = []
    for gradient in (keys[1], values[1], keys[2], values[2]):
        matrix = (gradient.double().T @ gradient.double()) / 12
        blocks.append(matrix + 0.3 * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64))
    torch.testing.assert_close(found, torch.block_diag(*blocks), rtol=1e-5, atol=1e-5)


def test_latent_rows_have_no_values():
    fisher = Fisher(2, 6, 0)
    fisher.add([torch.ones(3, 6)] * 2, [torch.ones(3, 0)] * 2, 3)
    assert fisher.of_layers(range(0, 2)).shape == (12, 12)


def test_no_tokens_have_no_information():
    with pytest.raises(ValueError, match="no tokens"):
        Fisher(1, 2, 2).of_layers([0])


def test_a_profile_for_rotated_codes_has_a_scale_a_layer_and_kind():
    rows = SOURCE.rows(500, 1)
    moments = moments_of(rows)
    info = ProfileInfo("hadamard", "m", "float32", 6, 1, 6, 4, 1, True, 0.5, 0.6, 500, "fisher")
    weights = torch.arange(1.0, WIDTH + 1, dtype=torch.float64)
    profile = make_profile(info, moments, lambda unit: torch.diag(weights * (unit.start + 1)))
    for layer, unit in enumerate(profile.units):
        want = [0.5 / (mean * (layer + 1)) ** 0.5 for mean in (6 * [3.5] + 4 * [8.5])]
        torch.testing.assert_close(unit.basis.dense(), torch.diag(torch.tensor(want)), rtol=1e-5, atol=1e-6)
    assert profile.units[3].weights.dense().shape == (WIDTH, WIDTH)
