"""``sglang-plt calibrate`` on a tiny model: what it writes, taking up a stopped run, and wrong arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_plt.calibration.identity import default_profile, model_identity
from sglang_plt.cli import main
from sglang_plt.codec import ProfileError, load_profile
from sglang_plt.quality.collect import Collection, collect
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.profiles import load_profiles
from sglang_plt.quality.texts import builtin_windows
from tests.tiny_model import make_tiny_llama

QUICK = ("--tokens", "4096", "--window", "512", "--group", "1")


@pytest.fixture(scope="module")
def made(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("profiles")
    assert main(["calibrate", "--model-path", str(tiny_llama_dir), "--output", str(directory), *QUICK]) == 0
    return directory


def test_writes_a_profile_a_codec_and_leaves_nothing_else(made: Path, tiny_llama_dir: Path):
    identity = model_identity(tiny_llama_dir)
    names = {default_profile(identity, "float32", codec).name for codec in ("fast", "dense")}
    assert {file.name for file in made.iterdir()} == names
    for name in names:
        info = load_profile(made / name).info
        assert (info.model, info.sensitivity, info.predicts) == (identity, "fisher", True)
        assert info.tokens > 1000  # what is behind the sensitivities is not counted


def test_kl_takes_the_profiles(made: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["kl", "--model-path", str(tiny_llama_dir), "--profile", str(made), "--codec", "fast", "dense-tight"]
    assert main([*argv, "--windows", "1", "--context", "64", "--continuation", "16", "--turns", "4"]) == 0
    shown = capsys.readouterr().out
    assert "fast" in shown
    assert "dense-tight" in shown


def test_a_profile_of_another_model_is_refused(made: Path, tmp_path: Path):
    other = make_tiny_llama(tmp_path / "other", seed=1)
    file = next(made.glob("*.dense.safetensors"))
    with pytest.raises(ProfileError, match="made for model="):
        load_profiles(other, ReferenceModel(other), ["dense"], file)


def test_a_stopped_run_is_taken_up(tiny_llama_dir: Path, tmp_path: Path):
    model = ReferenceModel(tiny_llama_dir)
    windows = builtin_windows(model.tokenizer, 4, 512, "calibration")
    state = tmp_path / "state"

    def run(count: int, key: str = "same") -> Collection:
        collection = Collection(model.layout, 1, key)
        collection.resume(state)
        collect(model, windows[:count], 1, collection, state, save_every=1)
        return collection

    whole = run(4)
    state.unlink()
    run(2)
    resumed = run(4)
    assert resumed.done == 4
    for one, other in zip(resumed.moments.sums, whole.moments.sums, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(resumed.fisher.values, whole.fisher.values)
    assert not Collection(model.layout, 1, "other text").resume(state)
    state.write_bytes(b"damaged")
    assert not Collection(model.layout, 1, "same").resume(state)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "10"], "--tokens=10 is too few"),
        (["--window", "100"], "--window=100 must be at least 512"),
        (["--window", "9999999"], "--window=9999999 exceeds"),
        (["--kl", "0"], "--kl=0.0 must be above 0"),
        (["--group", "0"], "--group=0 must be at least 1"),
        (["--model-path", "/nowhere"], "--model-path=/nowhere is not a model directory"),
        (["--text", "/nowhere"], "--text=/nowhere cannot be read"),
        (["--text", __file__], "give a longer text"),
        (["--output", "/dev/null/x"], "--output=/dev/null/x is not a directory"),
    ],
)
def test_wrong_arguments(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str):
    assert main(["calibrate", "--model-path", str(tiny_llama_dir), *argv]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_profile_without_prediction_is_measured_where_it_is_named(tiny_llama_dir: Path, tmp_path: Path):
    base = ["--model-path", str(tiny_llama_dir)]
    assert (
        main(["calibrate", *base, "--output", str(tmp_path), *QUICK, "--codec", "dense", "--no-predictive-delta"]) == 0
    )
    (file,) = tmp_path.iterdir()
    assert file.name.endswith(".dense-flat.safetensors")
    found = load_profiles(tiny_llama_dir, ReferenceModel(tiny_llama_dir), ["fast", "dense", "dense-tight"], file)
    assert set(found) == {"dense", "dense-tight"}
    assert not any(unit.weights.codes.numel() for unit in found["dense"].units)


def test_kl_refuses_a_profile_that_is_not_there(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["kl", "--model-path", str(tiny_llama_dir), "--codec", "fast", "--profile", "/nowhere"]) == 2
    assert "--profile=/nowhere does not exist" in capsys.readouterr().err.splitlines()[-1]
