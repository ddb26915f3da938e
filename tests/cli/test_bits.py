"""``sglang-plt bits``: a small run, what it projects and how that is marked, and every argument that it refuses."""

import math

import pytest
import torch

from sglang_plt import cli
from sglang_plt.quality import bits
from sglang_plt.quality.arms import make_arms
from sglang_plt.quality.geometry import MODELS, decode_flops
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.seed import TOKENS, project, seed_cells, seed_table
from sglang_plt.quality.texts import builtin_windows
from sglang_plt.results import Row, read_rows

QUICK = ("--windows", 2, "--context", 300)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So little work gains nothing from threads that wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_profiles(tmp_path, monkeypatch):
    """Whatever profiles this machine has."""
    monkeypatch.setenv("SGLANG_PLT_PROFILES", str(tmp_path / "profiles"))


def run(*argv: object) -> int:
    return cli.main(["bits", *map(str, argv)])


def test_one_run(demo_model_dir, tmp_path, capsys):
    path = tmp_path / "bits.json"
    assert run("--model-path", demo_model_dir, *QUICK, "--repeats", 1, "--json", path) == 0
    found = {(row.metric, row.arm): row for row in read_rows(path)}
    value = {key: row.value for key, row in found.items()}
    assert 1 < value["surprisal_bits_per_token", "surprisal/code"] < 8
    assert 1 < value["surprisal_bits_per_token", "surprisal/prose"] < 8
    every = found["surprisal_bits_per_token", "surprisal/all"]
    assert every.lo <= every.value <= every.hi
    assert every.n == 2
    assert value["bits_per_token", "token-ids/all"] == pytest.approx(math.log2(49152))
    assert value["bits_per_token", "token-ids-int16/all"] == 16
    values = 30 * 2 * 3 * 64
    assert 32 < value["bits_per_value", "raw/all"] < 32.01  # two blocks' headers
    assert value["bits_per_token", "int4/all"] == pytest.approx(values * value["bits_per_value", "int4/all"])
    # four of 300 tokens stay at 32 bits
    inside = value["coded_bits_per_value", "int4/all"]
    assert value["bits_per_value", "int4/all"] == pytest.approx((4 * 32 + 296 * inside) / 300)
    assert 4 < inside < 5.5
    for codec in ("raw", "int4"):
        ratio = value["decode_tokens_per_s", f"{codec}/all"] / value["prefill_tokens_per_s", "prefill/all"]
        assert value["decode_vs_prefill", f"{codec}/all"] == pytest.approx(ratio)
    assert found["seed_bytes", "llama-3.1-70b/131072/fp16"].value == 131072 * 2 * 2 * 80 * 8 * 128
    for name in ("fp16", "3bit", "int4", "token-ids", "surprisal"):
        assert found["seed_bytes", f"llama-3.1-70b/8192/{name}"].n == 0
        assert found["seed_seconds", f"llama-3.1-70b/8192/{name}"].unit == "s"
    assert value["link_gb_per_s", "assumed"] == 50
    assert not any("encode" in metric or arm.startswith(("fast", "dense")) for metric, arm in found)
    captured = capsys.readouterr()
    assert "without fast and dense: no profile of this model; make one with sglang-plt calibrate" in captured.err
    assert "window 2 of 2 (code): bits a token: surprisal" in captured.err
    assert "m int4/prose" in captured.out
    assert "= token-ids/all" in captured.out


def test_of_a_text_without_times(tiny_llama_dir, tmp_path, capsys):
    text, path = tmp_path / "text.txt", tmp_path / "bits.json"
    text.write_text(" one two three four five six seven eight" * 100)
    argv = ("--text", text, "--codec", "int8", "--repeats", 0, "--link-gb-s", 25, "--json", path)
    assert run("--model-path", tiny_llama_dir, *QUICK, *argv) == 0
    found = {(row.metric, row.arm): row.value for row in read_rows(path)}
    # random weights know nothing of the text
    assert found["surprisal_bits_per_token", "surprisal/all"] > 14
    assert {arm for metric, arm in found if metric == "bits_per_value"} == {"int8/all"}  # one kind of text
    assert not any(metric.endswith(("per_s", "vs_prefill")) and arm != "assumed" for metric, arm in found)
    halved = found["seed_seconds", "llama-3.1-70b/8192/fp16"]
    assert halved == pytest.approx(found["seed_bytes", "llama-3.1-70b/8192/fp16"] / 25e9)
    assert "assumed link of 25 GB/s" in capsys.readouterr().out


def test_a_codec_with_a_profile(tiny_llama_dir, tmp_path, capsys):
    model = ReferenceModel(tiny_llama_dir)
    arms = make_arms(("dense",), model, tiny_llama_dir, 4096, tmp_path / "calibration", {}, lambda line: None)
    profile, path = tmp_path / "dense.safetensors", tmp_path / "bits.json"
    arms[0].profile.save(profile)
    argv = ("--codec", "dense", "dense-tight", "--profile", profile, "--repeats", 0, "--json", path)
    assert run("--model-path", tiny_llama_dir, *QUICK, *argv) == 0
    found = {(row.metric, row.arm): row.value for row in read_rows(path)}
    for name in ("dense", "dense-tight"):
        rate, size = found["coded_bits_per_value", f"{name}/all"], found["seed_bytes", f"llama-3.1-70b/8192/{name}"]
        assert size == pytest.approx(80 * 2048 * (rate * 8188 + 16 * 4) / 8)
    assert found["bits_per_value", "dense/all"] < found["bits_per_value", "dense-tight/all"]
    assert "dense was measured with transforms of 3 layers" in capsys.readouterr().out


def test_surprisal_is_that_of_one_pass(tiny_llama_dir):
    model = ReferenceModel(tiny_llama_dir)
    (window,) = builtin_windows(model.tokenizer, 1, 600)
    rows = model.prefill(window.ids)
    empty = rows.part(slice(0, 0))
    log_p = torch.log_softmax(model.continue_from(empty, window.ids).double(), -1)
    expected = -log_p[torch.arange(599), window.ids[1:]].mean() / math.log(2)
    assert bits.surprisal(model, rows, window.ids) == (pytest.approx(float(expected), abs=1e-4), 49152)


def test_a_projection_follows_from_its_rates():
    model, tokens = MODELS["llama-3.1-70b"], 32768
    ways = project(tokens, {"int4": 4.5, "dense": 1.5}, 4.0, link_gb_s=50, tflops=400)
    values = model.num_layers * model.width
    assert ways["fp16"].size == tokens * values * 2
    assert ways["3bit"].size == tokens * values * 3 / 8
    assert ways["dense"].size == ((tokens - 4) * 1.5 + 4 * 16) * values / 8
    assert ways["int4"].seconds == ways["int4"].size / 50e9
    transform = tokens * decode_flops(model.profile_info()) / 400e12
    assert ways["dense"].seconds == pytest.approx(ways["dense"].size / 50e9 + transform)
    assert ways["token-ids"].size == tokens * 17 / 8
    assert ways["surprisal"].size == tokens * 4 / 8
    attention = 4 * 80 * 8192 * tokens * (tokens + 1) / 2
    assert ways["surprisal"].seconds == pytest.approx((tokens * model.prefill_flops + attention) / 400e12)
    assert {name for name, cell in ways.items() if cell.measured} == {"int4", "dense", "surprisal"}


def test_no_cell_of_a_projection_is_without_its_mark():
    measured = [
        Row("surprisal_bits_per_token", "surprisal/all", 4.0, "bits"),
        *(Row("coded_bits_per_value", f"{codec}/all", 1.5, "bits") for codec in ("raw", "dense")),
        Row("coded_bits_per_value", "dense/code", 1.2, "bits"),
    ]
    cells = seed_cells(measured, 50, 400)
    assert list(cells) == list(TOKENS)
    _, head, *lines = seed_table(cells, 50, 400, {"dense": 3}).splitlines()
    assert head.split() == ["kept", "as", "fp16", "3", "bits", "dense", "token-ids", "surprisal"]
    marks = [[text for text in line.split() if text in ("m", "=", "p")] for line in lines]
    assert marks[0] == ["=", "=", "m", "=", "m"]
    assert marks[1:6] == [["=", "=", "p", "=", "p"]] * 5
    assert marks[6:11] == [["p"] * 5] * 5
    assert lines[11].startswith("dense was measured with transforms of 3 layers")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--codec", "int3"], "invalid choice: 'int3' (choose from"),
        (["--context", "4"], "--context=4 must be at least 5: the first four tokens stay exact"),
        (["--context", "4097"], "--context=4097 is more than the 4096 positions of the model: lower it"),
        (["--windows", "0"], "--windows=0 must be at least 1"),
        (["--windows", "many"], "invalid int value: 'many'"),
        (["--repeats", "-1"], "--repeats=-1 must not be negative"),
        (["--link-gb-s", "0"], "--link-gb-s=0 must be a positive number"),
        (["--link-gb-s", "nan"], "--link-gb-s=nan must be a positive number"),
        (["--prefill-tflops", "-2.5"], "--prefill-tflops=-2.5 must be a positive number"),
        (["--prefill-tflops", "fast"], "invalid float value: 'fast'"),
        (["--codec", "raw", "dense"], "--codec=dense needs a profile: make one with sglang-plt calibrate"),
        (["--profile", "no.safetensors"], "--profile=no.safetensors does not exist; make one with sglang-plt"),
        (["--profile", "short.txt"], "cannot be read"),
        (["--text", "short.txt"], "--text=short.txt has 2 tokens, 6 windows of 1024 need 6144: give a longer"),
        (["--text", "no.txt"], "--text=no.txt cannot be read (No such file or directory)"),
        (["--json", "no/such/file"], "--json=no/such/file: "),
    ],
)
def test_refusals(argv, expected, tiny_llama_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    assert run("--model-path", tiny_llama_dir, *argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sglang-plt: error: ")]
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_model_path_that_is_no_model(tmp_path, capsys):
    assert run("--model-path", tmp_path) == 2
    assert f"--model-path={tmp_path} is not a model directory" in capsys.readouterr().err
