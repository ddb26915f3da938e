"""``sglang-plt kl``: a tiny measurement on the demo model, and every argument that it refuses."""

import math

import pytest
import torch

from sglang_plt import cli
from sglang_plt.quality import QualityError, kl
from sglang_plt.quality.library import library_sources
from sglang_plt.quality.model import ReferenceModel, Rows
from sglang_plt.quality.texts import builtin_windows, file_windows
from sglang_plt.results import read_rows


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So little work gains nothing from threads that wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(demo_model_dir):
    return ReferenceModel(demo_model_dir)


def run(*argv: object) -> int:
    return cli.main(["kl", *map(str, argv)])


def test_raw_is_exact_and_int8_is_close(demo_model_dir, tmp_path, capsys):
    path = tmp_path / "kl.json"
    sizes = ("--windows", 1, "--context", 300, "--continuation", 24)
    assert run("--model-path", demo_model_dir, *sizes, "--json", path) == 0
    found = {(row.metric, row.arm): row for row in read_rows(path)}
    value = {key: row.value for key, row in found.items()}
    assert value["kl_warm_cold", "raw"] == 0
    assert value["top1_agreement", "raw"] == 1
    assert 0 < value["kl_warm_cold", "int8"] <= 0.003
    assert value["kl_warm_cold", "int8"] < value["kl_warm_cold", "int4"] < 0.1
    # two blocks; int8 adds a low and a scale for 64 numbers of a value head, and for the keys of each channel
    assert 32 < value["bits_per_value", "raw"] < 32.01
    assert 8 < value["bits_per_value", "int8"] < 10
    assert 4 < value["bits_per_value", "int4"] < 6
    assert found["kl_warm_cold", "int8"].n == 1
    assert found["kl_warm_cold", "int8"].lo is None  # one window has no interval
    captured = capsys.readouterr()
    assert "keys stored without RoPE" in captured.err
    assert "int4" in captured.out


def test_the_rotary_is_proved_and_undone(model):
    rotary = model.rotary(300)
    assert rotary is not None
    assert (rotary.rotary_dim, rotary.is_neox) == (64, True)
    # the first layer's key of a token does not depend on its position once the rotation is undone
    keys = model.prefill([5, 6] * 150).keys[0]
    still = rotary.undo(keys, torch.arange(300))
    torch.testing.assert_close(still[0::2], still[:1].expand(150, -1, -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotary.apply(still, torch.arange(300)), keys, rtol=1e-5, atol=1e-5)


def test_a_rotary_that_is_not_understood_is_none(model, monkeypatch):
    forward = model._forward

    def turned_otherwise(ids, positions):
        rows = forward(ids, positions)
        return Rows(tuple(key.flip(0) for key in rows.keys), rows.values)

    monkeypatch.setattr(model, "_forward", turned_otherwise)
    assert model.rotary(64) is None


def test_divergence_is_the_formula():
    cold = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    warm = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]))
    expected = (0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2
    assert kl.divergence(cold, warm) == (pytest.approx(expected), 0.5)


def test_intervals_are_over_windows():
    samples = [kl.Sample("int8", kind, value, 1.0, 8.5) for kind, value in (("prose", 0.001), ("code", 0.003))]
    found = {(row.metric, row.arm): row for row in kl.rows_of(samples)}
    row = found["kl_warm_cold", "int8"]
    assert (row.value, row.lo, row.hi, row.n) == (pytest.approx(0.002), pytest.approx(0.001), pytest.approx(0.003), 2)
    assert found["kl_warm_cold", "int8/prose"].value == 0.001


def test_built_in_windows_are_of_three_kinds_and_reproducible(model):
    windows = builtin_windows(model.tokenizer, 4, 64)
    assert [window.kind for window in windows] == ["prose", "code", "chat", "prose"]
    assert {len(window.ids) for window in windows} == {64}
    assert windows == builtin_windows(model.tokenizer, 4, 64)
    assert windows[0].ids != windows[3].ids
    assert "<|im_start|>user" in model.tokenizer.decode(windows[2].ids)
    with pytest.raises(QualityError, match="the built-in prose does not fill 3000 windows of 2 tokens"):
        builtin_windows(model.tokenizer, 3000, 2)


def test_calibration_and_evaluation_share_no_text(model):
    evaluation, calibration = (
        builtin_windows(model.tokenizer, 12, 64, split) for split in ("evaluation", "calibration")
    )
    assert not {tuple(window.ids[8:40]) for window in evaluation} & {tuple(window.ids[8:40]) for window in calibration}
    assert not set(library_sources("evaluation")) & set(library_sources("calibration"))


def test_windows_of_a_file_are_spread(model, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" one two three four five six seven eight" * 10)
    ids = model.tokenizer(path.read_text()).input_ids
    first, last = file_windows(model.tokenizer, path, 2, 16)
    assert (first.ids, last.ids) == (ids[:16], ids[-16:])
    (only,) = file_windows(model.tokenizer, path, 1, len(ids))
    assert only.ids == ids


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--codec", "int3"], "invalid choice: 'int3' (choose from"),
        (["--context", "0"], "--context=0 must be at least 1"),
        (["--windows", "many"], "invalid int value: 'many'"),
        (["--context", "8000"], "need 8256 positions, the model has 8192: lower them"),
        (["--text", "short.txt"], "--text=short.txt has 2 tokens, 6 windows of 1280 need 7680: give a longer"),
        (["--text", "latin.txt"], "--text=latin.txt is not UTF-8 (byte 0)"),
        (["--text", "no.txt"], "--text=no.txt cannot be read (No such file or directory)"),
        (["--json", "no/such/file"], "--json=no/such/file: "),
    ],
)
def test_refusals(argv, expected, demo_model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    assert run("--model-path", demo_model_dir, *argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sglang-plt: error: ")]
    assert len(errors) == 1
    assert expected in errors[0]


@pytest.mark.parametrize("kind", ["missing", "file", "no config", "bad config"])
def test_a_model_path_that_is_no_model(kind, tmp_path, capsys):
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("x")
    elif kind != "missing":
        path.mkdir()
    if kind == "bad config":
        (path / "config.json").write_text("{}")
    assert run("--model-path", path) == 2
    error = capsys.readouterr().err
    assert f"--model-path={path} " in error
    assert ("cannot be loaded" if kind == "bad config" else "is not a model directory") in error
    assert error.count("\n") == 1
