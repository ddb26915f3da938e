"""Choices of block sizes: the default without a file, what was measured with one, never a file that does not fit."""

import json
from dataclasses import asdict, dataclass

import pytest
import torch
import triton

from triton_ops import tuning


@dataclass(frozen=True)
class Sizes:
    rows: int
    warps: int


CANDIDATES = [Sizes(64, 4), Sizes(32, 4), Sizes(64, 8)]


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "tuned.json"
    monkeypatch.setenv("TRITON_OPS_TUNED", str(path))
    for cached in (tuning._read, tuning._warn):
        cached.cache_clear()
    yield path
    for cached in (tuning._read, tuning._warn):
        cached.cache_clear()


def choose(device="GPU"):
    return tuning.chosen("decode", "8x128", CANDIDATES, device)


def tune(times, device="GPU"):
    left = list(times)
    return tuning.tune("decode", "8x128", CANDIDATES, device, lambda: left.pop(0))


def test_the_default_at_once(file):
    assert choose() is CANDIDATES[0]
    assert tuning.device_name(torch.device("cpu")) == ""
    assert choose("") is CANDIDATES[0]
    assert not file.exists()


def test_the_best_is_kept_for_this_device_kernel_and_shape(file):
    seen = []
    times = iter([3.0, 1.0, 2.0])

    def seconds():
        seen.append(choose())
        return next(times)

    best, measured = tuning.tune("decode", "8x128", CANDIDATES, "GPU", seconds)
    assert seen == CANDIDATES
    assert (best, measured) == (CANDIDATES[1], [3.0, 1.0, 2.0])
    assert choose() is CANDIDATES[1]
    assert choose("other GPU") is CANDIDATES[0]
    assert tuning.chosen("decode", "1x64", CANDIDATES, "GPU") is CANDIDATES[0]
    tuning.tune("encode", "8x128", CANDIDATES, "GPU", lambda: 1.0)
    assert choose() is CANDIDATES[1]  # the other choice stays in the file
    assert json.loads(file.read_text())["devices"]["GPU"]["decode"]["8x128"] == asdict(CANDIDATES[1])
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_candidates_that_do_not_run_are_left_out():
    def seconds():
        if choose() != CANDIDATES[2]:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    assert tuning.tune("decode", "8x128", CANDIDATES, "GPU", seconds) == (CANDIDATES[2], [None, None, 1.0])
    candidates = CANDIDATES[:2]
    with pytest.raises(RuntimeError, match="no candidate of decode for 8x128 runs on GPU"):
        tuning.tune("decode", "8x128", candidates, "GPU", seconds)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '"text"',
        '{"format": 1}',
        '{"format": 1, "triton": "TRITON", "devices": {"GPU": 3}}',
        '{"format": 1, "triton": "TRITON", "devices": {"GPU": {"decode": {"8x128": 5}}}}',
        "\udcff",
    ],
)
def test_a_damaged_file_is_ignored_and_said_so(content, file):
    file.parent.mkdir()
    file.write_bytes(content.replace("TRITON", triton.__version__).encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"tuned\.json is damaged; default block sizes are used instead"):
        assert choose() is CANDIDATES[0]
    tune([2.0, 1.0, 3.0])
    assert choose() is CANDIDATES[1]


def test_a_file_of_another_triton_and_a_foreign_choice_are_ignored(file):
    file.parent.mkdir()
    devices = {"GPU": {"decode": {"8x128": {"rows": 64, "warps": 8}}}}
    file.write_text(json.dumps({"format": 1, "triton": "0.1", "devices": devices}))
    with pytest.warns(UserWarning, match=r"of format 1 and triton 0\.1; default"):
        assert choose() is CANDIDATES[0]
    tuning._read.cache_clear()
    devices["GPU"]["decode"]["8x128"]["rows"] = 63
    file.write_text(json.dumps({"format": 1, "triton": triton.__version__, "devices": devices}))
    with pytest.warns(UserWarning, match="is no choice of decode for 8x128; default"):
        assert choose() is CANDIDATES[0]
