"""Bits at a divergence, intervals over windows, arms of rows, and sizes beside larger models."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_plt.calibration.make import make_profile
from sglang_plt.calibration.moments import Moments
from sglang_plt.codec import ProfileInfo
from sglang_plt.quality import kl
from sglang_plt.quality.curves import BITS_AT, bits_at, rows_of, table
from sglang_plt.quality.geometry import MODELS, decode_flops, geometry_rows, profile_bytes
from sglang_plt.quality.rate_distortion import Continuation, Sample


def sample(arm: str, bits: float, nats: float, kind: str = "prose", context: int = 64) -> Sample:
    return Sample(arm, context, kind, nats, 0.9, 0.01, bits, 0.25, 10)


def test_log_divergence_is_linear_in_bits():
    bits, nats = np.array([[4.0, 2.0, 3.0]]), np.array([[1e-4, 1e-2, 1e-3]])
    assert bits_at(bits, nats, 1e-3)[0] == pytest.approx(3.0)
    assert bits_at(bits, nats, 10**-3.5)[0] == pytest.approx(3.5)
    assert bits_at(bits, nats, 1e-1)[0] == pytest.approx(1.0)  # beyond the points, for draws that miss the target
    assert bits_at(bits, nats, 1e-5)[0] == pytest.approx(5.0)
    # where noise makes a curve pass twice, the last time counts
    assert bits_at(np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[1e-2, 1e-4, 1e-2, 1e-4]]), 1e-3)[0] == pytest.approx(
        3.5
    )


def test_rows_have_all_and_domains_and_intervals_over_windows():
    samples = [
        sample(f"kivi@{bits:g}", bits, nats * factor, kind)
        for kind, factor in (("prose", 1.0), ("code", 2.0))
        for bits, nats in ((3.0, 0.01), (5.0, 0.0001))
    ]
    found = {(row.metric, row.arm): row for row in rows_of(samples)}
    row = found["kl", "kivi@3/64/all"]
    assert (row.value, row.lo, row.hi, row.n) == (pytest.approx(0.015), pytest.approx(0.01), pytest.approx(0.02), 2)
    assert found["kl", "kivi@3/64/code"].value == 0.02
    assert found["kl", "kivi@3/64/code"].lo is None  # one window
    assert found["bits_per_token", "kivi@3/64/all"].value == 30
    assert found["profile_bits_per_value", "kivi@3/64/all"].value == 0.25
    assert found["top1_agreement", "kivi@3/64/all"].value == 0.9
    assert found["ppl_ratio", "kivi@3/64/all"].value == pytest.approx(math.exp(0.01))
    assert found[BITS_AT, "kivi/64/prose"].value == pytest.approx(3 + 2 * math.log(10 / 3) / math.log(100))
    row = found[BITS_AT, "kivi/64/all"]
    assert row.value == pytest.approx(3 + 2 * math.log(5) / math.log(100))
    assert row.lo == pytest.approx(found[BITS_AT, "kivi/64/prose"].value)
    assert row.hi == pytest.approx(found[BITS_AT, "kivi/64/code"].value)
    assert "kivi@3/64" in table(rows_of(samples))


def test_a_tight_codec_is_a_point_of_its_sibling_and_a_target_that_is_missed_has_no_row():
    samples = [sample("dense", 2.0, 0.004), sample("dense-tight", 3.0, 0.001), sample("raw", 32.0, 0.0)]
    samples += [sample("int@4", 4.0, 0.02), sample("int@5", 5.0, 0.004)]
    found = {row.arm: row for row in rows_of(samples) if row.metric == BITS_AT}
    assert set(found) == {"dense/64/all", "dense/64/prose"}
    assert found["dense/64/all"].value == pytest.approx(2 + math.log(4 / 3) / math.log(4))


def test_a_continuation_is_compared_as_the_kl_command_does():
    logits = torch.randn(70, 50, generator=torch.Generator().manual_seed(0))
    other = logits + 0.1 * torch.randn(70, 50, generator=torch.Generator().manual_seed(1))
    ids = [number % 50 for number in range(70)]
    exact = Continuation(logits, ids)
    assert exact.compare(logits) == (0.0, 1.0, 0.0)
    nats, same, log_ppl = exact.compare(other)
    assert (nats, same) == pytest.approx(kl.divergence(logits, other))
    surprise = [
        torch.nn.functional.cross_entropy(x[:-1].double(), torch.tensor(ids[1:])).item() for x in (logits, other)
    ]
    assert log_ppl == pytest.approx(surprise[1] - surprise[0])


def shape(layers: int, width: int, group: int, **fields: int) -> ProfileInfo:
    half = width // 2
    info = ProfileInfo("dense", "m", "float32", layers, 1, width - half, half, group, True, 0.1, 1.0, 100, "fisher")
    return replace(info, **fields)


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("tokens", [{}, {"hidden": 5, "token_layers": 3}])
def test_profile_bytes_are_those_of_a_profile(group, tokens):
    info = shape(4, 6, group, **tokens)
    moments = Moments(4, 6, group, *tokens.values())
    generator = torch.Generator().manual_seed(0)
    moments.add([torch.randn(100, 6, generator=generator) for _ in range(4)], torch.randn(100, 5, generator=generator))
    profile = make_profile(info, moments, lambda unit: torch.eye(6 * len(unit)))
    assert profile_bytes(info) == profile.num_bytes


def test_shares_of_larger_models():
    # parameters follow from the sizes and the width of the feed-forward layers
    for name, feed_forward in (("llama-3.1-8b", 14336), ("llama-3.1-70b", 28672)):
        model = MODELS[name]
        attention = 2 * model.hidden**2 + 2 * model.hidden * model.kv_heads * model.head_dim
        layer = attention + 3 * model.hidden * feed_forward + 2 * model.hidden
        assert model.parameters == 2 * model.vocab * model.hidden + model.num_layers * layer + model.hidden
    assert decode_flops(shape(2, 3, 1)) == 2 * 9 + 2 * (9 + 9)
    assert decode_flops(shape(2, 3, 2)) == 2 * 36
    assert decode_flops(shape(2, 3, 1, hidden=7, token_layers=1)) == 2 * 9 + 2 * (9 + 9) + 2 * 7 * 3
    found = {(row.metric, row.arm): row.value for row in geometry_rows()}
    assert found["profile_share_of_weights", "llama-3.1-8b"] == pytest.approx(0.01706, abs=1e-5)
    assert found["decode_flops_share", "llama-3.1-8b"] == pytest.approx(0.0391, abs=1e-4)
    assert found["profile_share_of_weights", "llama-3.1-70b"] < 0.005
    assert found["decode_flops_share", "llama-3.1-70b"] == pytest.approx(0.0100, abs=1e-4)
