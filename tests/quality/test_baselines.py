"""Published methods as measurements: every bit counted by hand, exact first tokens, and what each is fitted to."""

import numpy as np
import pytest
import torch

from sglang_plt.calibration.moments import Moments
from sglang_plt.calibration.sensitivity import Fisher
from sglang_plt.codec import RowLayout
from sglang_plt.codec.entropy import encode_numbers
from sglang_plt.quality.baselines import FITTED, PLAIN, Statistics
from sglang_plt.quality.baselines.aqua import Aqua
from sglang_plt.quality.baselines.groups import IntPerToken, Kivi
from sglang_plt.quality.baselines.kvtc import Kvtc, principal_components
from sglang_plt.quality.baselines.rotated import Rotated, RotatedFisher
from triton_ops import rotated

LAYERS, HEADS, DIM = 7, 2, 16
LAYOUT = RowLayout(LAYERS, HEADS, DIM, DIM, torch.float32)
WIDTH = 2 * HEADS * DIM
EXACT_BITS = 4 * LAYERS * WIDTH * 32


def chained_rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Layers that follow from the one below, up to a tenth of their size, on a large mean."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99)))[0]
    rows = [torch.randn(count, WIDTH, generator=generator)]
    for _ in range(LAYERS - 1):
        # keys from the keys below and values from the values below, as the predictor that is tested has it
        kept = torch.block_diag(mixing[:32, :32], mixing[:32, :32])
        rows.append(rows[-1] @ kept + 0.1 * torch.randn(count, WIDTH, generator=generator))
    return [row + 3 for row in rows]


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    moments = Moments(LAYERS, WIDTH, 6)
    moments.add(chained_rows(4000))
    fisher = Fisher(LAYERS, WIDTH // 2, WIDTH // 2)
    fisher.tokens = 2
    for layer in range(LAYERS):  # values matter 16 times more, and the first layers 4 times more
        fisher.keys[layer] = 2 * torch.eye(WIDTH // 2) * (4 if layer < 2 else 1)
        fisher.values[layer] = 16 * fisher.keys[layer]
    return Statistics(LAYOUT, moments, fisher)


def all_baselines(statistics: Statistics):
    found = [baseline for make in PLAIN.values() for baseline in make(LAYOUT)]
    return found + [baseline for make in FITTED.values() for baseline in make(statistics)]


@pytest.mark.parametrize("count", [1, 4, 5, 70, 300])
def test_the_first_four_rows_come_back_bit_for_bit(count, statistics):
    layers = chained_rows(count, seed=1)
    for baseline in all_baselines(statistics):
        restored, num_bits = baseline.through(layers)
        assert [row.shape for row in restored] == [row.shape for row in layers]
        assert all(torch.equal(a[:4], b[:4]) for a, b in zip(restored, layers, strict=True))
        if count <= 4:
            assert num_bits == EXACT_BITS * count // 4
        else:
            assert num_bits > EXACT_BITS
            assert not any(torch.equal(a[4:], b[4:]) for a, b in zip(restored, layers, strict=True))


def test_names_say_the_rate_and_more_bits_err_less(statistics):
    layers = chained_rows(200, seed=1)
    for make, source in [*((m, LAYOUT) for m in PLAIN.values()), *((m, statistics) for m in FITTED.values())]:
        points = make(source)
        assert len({point.name.partition("@")[0] for point in points}) == 1
        found = [point.through(layers) for point in points]
        bits = [num_bits for _, num_bits in found]
        errors = [sum(float((a - b).pow(2).sum()) for a, b in zip(rows, layers, strict=True)) for rows, _ in found]
        assert bits == sorted(bits)
        assert errors == sorted(errors, reverse=True)


def test_every_bit_of_integer_groups_is_counted():
    layers = chained_rows(4 + 70, seed=1)
    codes = 70 * LAYERS * WIDTH * 3
    # 32 channels a token are one group of keys and one of values
    assert IntPerToken(LAYOUT, 3).through(layers)[1] == EXACT_BITS + codes + LAYERS * 70 * 2 * 32
    # 64 tokens and 6 more are two groups of every key channel
    assert Kivi(LAYOUT, 3).through(layers)[1] == EXACT_BITS + codes + LAYERS * (2 * 32 + 70) * 32


def test_groups_are_64_numbers_of_a_token_or_of_a_channel():
    layout = RowLayout(1, 1, 96, 96, torch.float32)
    layer = torch.randn(4 + 64, 192, generator=torch.Generator().manual_seed(0))
    layer[:, 64:96] *= 100  # the second group of a token's keys
    layer[10, 70] = 1e4
    rows, num_bits = IntPerToken(layout, 4).through([layer])
    assert num_bits == 4 * 192 * 32 + 64 * (192 * 4 + 4 * 32)
    error = (rows[0] - layer).abs()
    assert error[:, :64].max() < 0.3
    rows, num_bits = Kivi(layout, 4).through([layer])
    assert num_bits == 4 * 192 * 32 + 64 * 192 * 4 + 96 * 32 + 64 * 2 * 32
    assert (rows[0] - layer).abs()[:, [*range(70), *range(71, 96)]].max() < 30  # the outlier spoils its channel only


def test_rotated_is_the_op_and_its_bytes():
    layers = chained_rows(30, seed=1)
    restored, num_bits = Rotated(LAYOUT, 3).through(layers)
    heads = layers[2][4:, WIDTH // 2 :].unflatten(1, (HEADS, DIM))
    assert torch.equal(restored[2][4:, WIDTH // 2 :], rotated.decode(*rotated.encode(heads, 3), 3, DIM).flatten(1))
    assert num_bits == EXACT_BITS + 26 * LAYERS * 2 * HEADS * (16 + 3 * DIM)


def test_bits_follow_sensitivity(statistics):
    bits = RotatedFisher(statistics, 4.0).bits
    assert [values - keys for keys, values in bits] == [2] * LAYERS
    assert bits[0][0] - bits[2][0] in (1, 2)  # one and a rounding
    assert sum(keys + values for keys, values in bits) / (2 * LAYERS) <= 4.0
    layers = chained_rows(200, seed=1)  # of variance 1 about a mean of 3, which costs nothing
    squares = [
        (a - b)[4:].pow(2).mean()
        for a, b in zip(RotatedFisher(statistics, 4.0).through(layers)[0], layers, strict=True)
    ]
    assert max(squares) < 0.15
    variances = chained_rows(4000)[3].var(0, correction=0)
    assert statistics.mean_variance((3, "values")) == pytest.approx(float(variances[WIDTH // 2 :].mean()), rel=1e-3)
    assert statistics.mean_sensitivity((3, "values")) == 16.0


def test_neighbours_are_those_of_the_moments(statistics):
    for layer in range(1, LAYERS):  # layer 6 begins the second unit
        below_mean, mean, below, cross, here = statistics.moments.covariances(range(layer, layer + 1))
        means, covariance = statistics.neighbours(layer)
        torch.testing.assert_close(means, torch.cat((below_mean, mean)))
        expected = torch.cat((torch.cat((below, cross), 1), torch.cat((cross.T, here), 1)))
        torch.testing.assert_close(covariance, expected)
    assert len(statistics.neighbours(0)[0]) == WIDTH


def test_kvtc_transforms_six_layers_and_codes_blocks_as_ours(statistics):
    components = principal_components(statistics)
    assert [(unit.layers, unit.kind) for unit in components] == [
        (range(0, 6), 0),
        (range(0, 6), 1),
        (range(6, 7), 0),
        (range(6, 7), 1),
    ]
    baseline = Kvtc(statistics, components, 2.0)
    # int8 with float32 scales of rows and columns, and a float32 mean
    assert baseline.profile_bytes == 2 * (192 * 192 + 32 * 32) + 2 * (2 * 4 + 4) * (192 + 32)
    layers = chained_rows(600, seed=1)
    restored, num_bits = baseline.through(layers)
    stored = 0
    for start, stop in ((4, 256), (256, 512), (512, 600)):
        codes = []
        for unit, kind, mean, _, analysis in baseline._units:
            x = torch.cat([layers[n][start:stop, kind * 32 : kind * 32 + 32] for n in unit], 1)
            codes.append(((x - mean) @ analysis).round().T.numpy().astype(np.int16))
        stored += 8 * len(encode_numbers(np.concatenate(codes)))
    assert num_bits == EXACT_BITS + stored
    errors = torch.cat([(a - b)[4:].flatten() for a, b in zip(restored, layers, strict=True)])
    assert 0 < float(errors.pow(2).mean()) < 0.1  # a tenth of a layer's noise is 0.01, its variance above 1


def test_aqua_codes_what_the_layer_below_does_not_tell(statistics):
    layers = chained_rows(400, seed=1)
    plain, plain_bits = Rotated(LAYOUT, 3).through(layers)
    predicted, bits = Aqua(statistics, 3).through(layers)
    assert bits == plain_bits
    square = [float((a - b)[4:].pow(2).mean()) for a, b in zip(predicted, layers, strict=True)]
    raw = [float((a - b)[4:].pow(2).mean()) for a, b in zip(plain, layers, strict=True)]
    assert max(square[1:]) < 0.01 * min(raw)
    # closed loop: errors of the layers below do not add up
    assert square[-1] < 2 * square[1]


def test_aqua_reads_only_what_the_decoder_has(statistics):
    baseline = Aqua(statistics, 2)
    layers = chained_rows(50, seed=1)
    restored, _ = baseline.through(layers)
    changed = [layer.clone() for layer in layers]
    changed[3][4:] += 0.5
    other, _ = baseline.through(changed)
    assert all(torch.equal(a, b) for a, b in zip(restored[:3], other[:3], strict=True))
    had = dict(enumerate(restored))
    weights, bias = baseline._predictors[5, "values"]
    inputs = torch.cat((had[5][4:, : WIDTH // 2], had[4][4:, WIDTH // 2 :]), 1)
    rest = (layers[5][4:, WIDTH // 2 :] - (bias + inputs @ weights)).unflatten(1, (HEADS, DIM))
    coded = rotated.decode(*rotated.encode(rest, 2), 2, DIM).flatten(1)
    torch.testing.assert_close(had[5][4:, WIDTH // 2 :], bias + inputs @ weights + coded)
