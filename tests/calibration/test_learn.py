"""A profile learned from rows that pass by: when it is there, what it is like, and what happens when it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_plt.calibration import learn
from sglang_plt.calibration.learn import SelfCalibration
from sglang_plt.calibration.make import SCALES
from sglang_plt.codec.profile import Profile, ProfileInfo

INFO = ProfileInfo("dense", "tiny", "float32", 2, 1, 4, 4, 2, False, 1.0, 1.0, 0, "kind")


def rows(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    below = torch.randn(count, 8, generator=generator)
    return [below, 10 * below.flip(1) + torch.randn(count, 8, generator=generator)]


def feed(learning: SelfCalibration, count: int = 64) -> None:
    for seed in range(count):
        while not learning.wants_rows and not learning.done:
            pass
        learning.offer(rows(32, seed))
        if learning.done:
            return


@pytest.mark.parametrize(("codec", "scale"), [("dense", 1.24), ("fast", 0.75)])
def test_learns_from_enough_rows(codec: str, scale: float):
    learning: SelfCalibration[Profile] = SelfCalibration(replace(INFO, codec=codec), lambda profile: profile)
    assert learning.wants_rows
    feed(learning)
    learning.join()
    assert learning.done
    assert not learning.wants_rows
    profile = learning.result
    assert profile.info.sensitivity == "kind"
    # fixed-width levels are coarser for their size, so a quantiser of them takes less of the same step
    assert profile.info.scale == SCALES[codec] == scale
    assert learning.rows_wanted <= profile.info.tokens < learning.rows_wanted + 32
    # one step is the same share of the variance of every layer and kind
    basis = profile.units[0].basis.dense()
    spread = (basis.square().sum(0).view(2, 2, 4).mean(2) / 12) ** 0.5
    deviations = torch.cat(rows(4000, 99), 1).view(-1, 2, 2, 4).square().mean((0, 3)).sqrt()
    shares = (spread / deviations).square()
    torch.testing.assert_close(shares, torch.full_like(shares, learn.NOISE_SHARE), rtol=0.2, atol=0)


def test_learns_what_tokens_say():
    info = replace(INFO, hidden=6, token_layers=2)
    learning: SelfCalibration[Profile] = SelfCalibration(info, lambda profile: profile)
    assert learning.rows_wanted == learn.ROWS_PER_CHANNEL * (8 * 3 + 6)
    mix = torch.randn(6, 8, generator=torch.Generator().manual_seed(5))
    for seed in range(64):
        while not learning.wants_rows and not learning.done:
            pass
        features = torch.randn(32, 6, generator=torch.Generator().manual_seed(1000 + seed))
        below, above = rows(32, seed)
        learning.offer([below + 30 * features @ mix, above], features)
        if learning.done:
            break
    learning.join()
    weights = learning.result.units[0].weights.dense()
    assert weights.shape == (6, 16)
    torch.testing.assert_close(weights[:, :8], 30 * mix, rtol=0.05, atol=1.0)


def test_what_cannot_be_built_ends_without_a_result(caplog: pytest.LogCaptureFixture):
    def fail(profile: Profile) -> None:
        raise RuntimeError("no memory")

    learning: SelfCalibration[None] = SelfCalibration(INFO, fail)
    feed(learning)
    learning.join()
    assert learning.done
    assert learning.result is None
    assert "no profile could be learned" in caplog.text


def test_rows_that_would_wait_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SelfCalibration, "_run", lambda self: None)  # a thread that takes nothing
    learning: SelfCalibration[Profile] = SelfCalibration(INFO, lambda profile: profile)
    for seed in range(5):
        learning.offer(rows(4, seed))
    assert not learning.wants_rows


def test_a_model_too_wide_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learn, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="second moments would take"):
        SelfCalibration(INFO, lambda profile: profile)
