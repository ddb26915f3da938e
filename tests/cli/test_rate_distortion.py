"""``sglang-plt rate-distortion``: a small run on a tiny model, a given profile, and every argument that it refuses."""

import pytest
import torch

from sglang_plt import cli
from sglang_plt.config import CODECS, PROFILED
from sglang_plt.quality.arms import NAMES, make_arms
from sglang_plt.quality.baselines import FITTED, PLAIN
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.rate_distortion import measure
from sglang_plt.quality.texts import builtin_windows
from sglang_plt.results import read_rows

QUICK = ("--windows", 2, "--context", 256, "--continuation", 32, "--tokens", 8192, "--repeats", 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """So little work gains nothing from threads that wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*argv: object) -> int:
    return cli.main(["rate-distortion", *map(str, argv)])


def test_every_arm_in_one_run(tiny_llama_dir, tmp_path, capsys):
    path, plot, state = tmp_path / "curves.json", tmp_path / "curves.png", tmp_path / "calibration"
    argv = ("--model-path", tiny_llama_dir, *QUICK, "--calibration", state)
    assert run(*argv, "--json", path, "--plot", plot) == 0
    found = {(row.metric, row.arm): row for row in read_rows(path)}
    value = {key: row.value for key, row in found.items()}
    assert value["kl", "raw/256/all"] == 0
    assert value["top1_agreement", "raw/256/all"] == value["ppl_ratio", "raw/256/all"] == 1
    names = {arm.split("/")[0] for metric, arm in found if metric == "kl"}
    methods = {name.split("@")[0] for name in names}
    assert methods == set(NAMES)
    for name in names:
        assert found["kl", f"{name}/256/all"].n == 2
        assert {f"{name}/256/{kind}" for kind in ("prose", "code")} <= {arm for _, arm in found}
    # 128 numbers a layer and two layers; four rows of 256 stay at 32 bits
    exact = 32 * 4 / 256
    assert value["bits_per_value", "kivi@4/256/all"] == pytest.approx(
        exact + 252 / 256 * (4 + (4 * 32 / 252 + 32 / 64) / 2)
    )
    assert value["bits_per_value", "rotated@4/256/all"] == pytest.approx(exact + 252 / 256 * (4 + 16 / 32))
    assert value["bits_per_token", "raw/256/all"] == pytest.approx(256 * value["bits_per_value", "raw/256/all"])
    assert value["profile_bits_per_value", "int8/256/all"] == 0
    for name in ("dense", "kvtc@3", "aqua@2"):
        assert 0 < value["profile_bits_per_value", f"{name}/256/all"] < 0.01
    assert value["kl", "dense-tight/256/all"] < value["kl", "dense/256/all"] < value["kl", "dense@x1.7/256/all"]
    assert value["bits_at_kl_0.003", "dense/256/all"] < value["bits_at_kl_0.003", "int/256/all"]
    for name in (*CODECS, *PROFILED):
        for metric in ("encode_vs_prefill", "decode_vs_prefill", "decode_tokens_per_s"):
            assert {value[metric, f"{name}/256/all/threads{threads}"] > 0 for threads in (1, 2)} == {True}
    assert 0 < value["profile_share_of_weights", "llama-3.1-70b"] < value["profile_share_of_weights", "llama-3.1-8b"]
    for name in ("fast/group1", "dense/group3", "dense-tight/group3"):
        assert 0 < value["components_used", name] <= 1
        assert found["components_used", name].n == 2  # one block a window
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        used, every = value["decode_flops_share_used", f"{name}/dense"], value["decode_flops_share", name]
        assert used <= every
        assert value["decode_flops_share_8192", name] < every
    assert plot.read_bytes().startswith(b"\x89PNG")
    captured = capsys.readouterr()
    assert "window 2 of 2 (code)" in captured.err
    assert "bits a value at KL 0.003" in captured.out
    assert "llama-3.1-8b, fast (projected)" in captured.out

    assert run(*argv, "--codec", "aqua", "--json", path) == 0  # from the same pass over the text
    assert "7 of 7 windows taken up" in capsys.readouterr().err
    again = {(row.metric, row.arm): row.value for row in read_rows(path)}
    assert again["kl", "aqua@3/256/all"] == value["kl", "aqua@3/256/all"]
    assert not any(metric.endswith("vs_prefill") for metric, _ in again)


def test_a_given_profile_is_measured_as_it_is(tiny_llama_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sglang_plt.quality.arms.FACTORS", (1.4, 0.7))  # whose product is 1
    model = ReferenceModel(tiny_llama_dir)
    state = tmp_path / "calibration"
    arms = make_arms(("dense",), model, tiny_llama_dir, 8192, state, {}, lambda line: None)
    assert [arm.name for arm in arms] == ["dense", "dense@x1.4", "dense@x0.7"]
    profile, path = tmp_path / "dense.safetensors", tmp_path / "curves.json"
    arms[1].profile.save(profile)
    argv = ("--model-path", tiny_llama_dir, *QUICK, "--calibration", state, "--json", path)
    assert run(*argv, "--codec", "dense", "dense-tight", "--profile", profile) == 0
    bits = {row.arm: row.value for row in read_rows(path) if row.metric == "bits_per_value"}
    windows = builtin_windows(model.tokenizer, 2, 288)
    wide, same = ([sample.bits for sample in measure(model, windows, 256, [arm])] for arm in (arms[1], arms[0]))
    assert bits["dense/256/all"] == pytest.approx(sum(wide) / 2)
    assert bits["dense@x0.7/256/all"] == pytest.approx(sum(same) / 2, rel=0.02)  # 1.4 times 0.7 of its step
    assert bits["dense-tight/256/all"] > bits["dense@x0.7/256/all"]
    capsys.readouterr()
    assert run(*argv, "--codec", "fast", "--profile", profile) == 2
    assert f"--profile={profile} has no profile of this model for fast" in capsys.readouterr().err


def test_help_names_all_that_can_be_asked_for(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines break behind hyphens
    assert f"{', '.join((*CODECS, *PROFILED))}, or published methods: {', '.join((*PLAIN, *FITTED))}" in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--codec", "int3"], "--codec=int3 is not known; choose from raw, int8, int4, fast, dense"),
        (["--context", "1024", "4"], "--context=4 must be at least 5: the first four tokens stay exact"),
        (["--continuation", "1"], "--continuation=1 must be at least 2"),
        (["--windows", "0"], "--windows=0 must be at least 1"),
        (["--windows", "many"], "invalid int value: 'many'"),
        (["--repeats", "-1"], "--repeats=-1 must not be negative"),
        (["--tokens", "100"], "--tokens=100 is too few for second moments"),
        (["--context", "256", "8000"], "--context=8000 and --continuation=256 need 8256 positions, the model has 4096"),
        (["--json", "no/such/file"], "--json=no/such/file: "),
        (["--plot", "no/such/file.png"], "--plot=no/such/file.png: "),
        (["--calibration", "no/such/file"], "--calibration=no/such/file: "),
        (
            ["--profile", "no.safetensors"],
            "--profile=no.safetensors does not exist; make one with sglang-plt calibrate",
        ),
        (["--profile", "text.txt", *map(str, QUICK)], "cannot be read"),
        (["--plot", "curves.xyz", "--codec", "raw", *map(str, QUICK)], "--plot=curves.xyz cannot be written"),
    ],
)
def test_refusals(argv, expected, tiny_llama_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("no profile")
    assert run("--model-path", tiny_llama_dir, *argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sglang-plt: error: ")]
    assert len(errors) == 1
    assert expected in errors[0]


def test_a_model_path_that_is_no_model(tmp_path, capsys):
    assert run("--model-path", tmp_path) == 2
    assert f"--model-path={tmp_path} is not a model directory" in capsys.readouterr().err


def test_rows_too_wide_for_joint_moments(tiny_llama_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sglang_plt.quality.arms._MOST_MOMENTS", 1000)
    assert run("--model-path", tiny_llama_dir, *QUICK, "--codec", "aqua") == 2
    assert "give a model with narrower rows, or --codec" in capsys.readouterr().err
    assert run("--model-path", tiny_llama_dir, *QUICK, "--codec", "kivi") == 0
