"""``sglang-plt delta-pairs``: a run on a tiny model, what the demo model's pairs take, and wrong arguments."""

from functools import cache

import pytest
import torch

from sglang_plt import cli
from sglang_plt.codec import load_profile
from sglang_plt.quality import QualityError, delta_pairs
from sglang_plt.quality.model import ReferenceModel
from sglang_plt.quality.pairs import NAMES, PROMPT, near_pairs
from sglang_plt.results import read_rows
from tests.demo_profile import fit_profile

MOST = {
    "synonym": (0.027, 0.0058),
    "punctuation": (0.022, 0.0030),
    "blank-line": (0.029, 0.0028),
    "inserted-word": (0.030, 0.0033),
    "name-and-date": (0.071, 0.0012),
    "name": (0.016, 0.0019),
    "document-swapped": (0.485, 0.0031),
    "documents-reordered": (0.262, 0.0043),
}
"""Bits a value and divergence of such pairs in these experiments."""


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


@pytest.fixture(scope="module")
def model(demo_model_dir):
    return ReferenceModel(demo_model_dir)


@pytest.fixture(scope="module")
def sample_of(model, demo_profile):
    """Of a pair, with the demo model."""
    profile = load_profile(demo_profile)
    pairs = {pair.name: pair for pair in near_pairs(model.tokenizer)}

    @cache
    def measured(name: str) -> delta_pairs.Sample:
        (found,) = delta_pairs.measure(model, [pairs[name]], {"dense": profile})
        return found

    return measured


def run(*argv: object) -> int:
    return cli.main(["delta-pairs", *map(str, argv)])


def test_two_pairs_in_one_run(tiny_llama_dir, tmp_path, capsys):
    tiny, path = ReferenceModel(tiny_llama_dir), tmp_path / "pairs.json"
    directory = tmp_path / "made"
    directory.mkdir()
    for codec in ("dense", "fast"):
        profile = fit_profile(tiny, tiny_llama_dir, tmp_path / "state", codec, 6, 512)
        profile.save(directory / f"{profile.info.model}-float32.{codec}.safetensors")
    argv = ("--model-path", tiny_llama_dir, "--profile", directory, "--pairs", "blank-line", "name")
    assert run(*argv, "--json", path) == 0
    found = {(row.metric, row.arm): row for row in read_rows(path)}
    value = {key: row.value for key, row in found.items()}
    assert {arm for _, arm in found} == {"name", "blank-line", "fast/name", "fast/blank-line"}
    for arm in ("name", "blank-line", "fast/name", "fast/blank-line"):
        assert 0 < value["bits_per_value", arm] < 0.6 * value["bits_per_value_alone", arm]
        for metric in ("kl", "kl_alone"):
            assert 0 < value[metric, arm] < 0.1
        assert 0.5 < value["top1_agreement", arm] <= 1
    assert found["bits_per_value_alone", "name"].n > found["bits_per_value", "name"].n > 700
    shown = capsys.readouterr()
    assert "teacher-forced; steps of the profile: 1 for the first, 1 for the second" in shown.out
    assert [line.split()[:2] for line in shown.out.splitlines()[2:]] == [
        [codec, pair] for codec in ("dense", "fast") for pair in ("blank-line", "name")
    ]
    argv = (*argv[:-2], "name", "--codec", "dense", "--reference-step", 0.5, "--step", 2)
    assert run(*argv, "--json", path) == 0
    other = {(row.metric, row.arm): row.value for row in read_rows(path)}
    assert {arm for _, arm in other} == {"name"}
    assert other["bits_per_value_alone", "name"] < value["bits_per_value_alone", "name"]
    assert other["bits_per_value", "name"] < value["bits_per_value", "name"]


def test_pairs_differ_as_they_are_named(model):
    pairs = {pair.name: pair for pair in near_pairs(model.tokenizer)}
    assert tuple(pairs) == NAMES == tuple(MOST)
    assert [pair.name for pair in near_pairs(model.tokenizer, ["name", "synonym"])] == ["synonym", "name"]
    for pair in pairs.values():
        one, other = pair.reference[:PROMPT], pair.target[:PROMPT]
        assert one != other
        assert len(set(one) ^ set(other)) < 400
    for name in ("synonym", "punctuation", "name"):  # a token became another
        one, other = pairs[name].reference, pairs[name].target
        assert sum(a != b for a, b in zip(one, other, strict=True)) <= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_near_duplicate_takes_what_the_experiments_found(sample_of, name):
    sample, (bits, kl) = sample_of(name), MOST[name]
    assert sample.bits <= 1.25 * bits
    assert sample.kl <= kl


def test_a_difference_is_as_good_as_coding_alone(sample_of):
    samples = [sample_of(name) for name in NAMES]
    for sample in samples:
        assert sample.bits < 0.2 * sample.bits_alone
        assert sample.near <= sample.tail
        assert (sample.apart is None) == (sample.near == sample.tail)
    whole, alone = (sum(getattr(sample, name) for sample in samples) for name in ("kl", "kl_alone"))
    assert whole < 1.25 * alone


def test_a_rotary_that_is_not_understood_is_refused(model, monkeypatch):
    monkeypatch.setattr(model, "rotary", lambda positions: None)
    with pytest.raises(QualityError, match="the model's rotary is not understood"):
        delta_pairs.measure(model, near_pairs(model.tokenizer, ["name"]), {})


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--codec", "int8"], "invalid choice: 'int8' (choose from"),
        (["--codec", "dense"], "--codec=dense needs a profile: make one with sglang-plt calibrate"),
        (["--pairs", "name", "colour"], "--pairs=colour is not known; choose from synonym, punctuation, "),
        (["--step", "0"], "--step=0.0 must be from 0.01 to 100 steps of the profile"),
        (["--reference-step", "nan"], "--reference-step=nan must be from 0.01 to 100 steps of the profile"),
        (["--step", "small"], "invalid float value: 'small'"),
        (["--profile", "no.safetensors"], "--profile=no.safetensors does not exist; make one with sglang-plt"),
        (["--profile", "short.txt"], "cannot be read"),
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
