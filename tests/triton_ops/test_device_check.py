"""The check for machines with a GPU: what it does without one, its table, and its checks in the interpreter."""

import json
from pathlib import Path

import pytest
import torch

from tests.tiny_model import REPO
from triton_ops import device_check, device_kernels
from triton_ops.device_table import NO_GPU, table
from triton_ops.report.cases import SHAPES

RESULTS = Path("bench_serving/results")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU fills the fields")
def test_without_a_gpu_every_field_is_empty_and_the_committed_files_are_that(tmp_path, capsys):
    file = tmp_path / "device.json"
    assert device_check.main(["--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results.pop("device") == NO_GPU
    assert set(results.values()) == {None}
    assert {name.split("/")[0] for name in results} == {
        "check", "tuned", "restore_ms", "unit", "GB_per_s", "flashinfer",
    }  # fmt: skip
    assert NO_GPU in capsys.readouterr().out
    committed = json.loads((REPO / RESULTS / "device.json").read_text())
    assert set(committed) == {"device", *results}
    if committed["device"] == NO_GPU:
        assert (REPO / RESULTS / "device.json").read_text() == file.read_text()
    assert (REPO / RESULTS / "device.md").read_text() == table(committed)


def test_numbers_and_failures_are_in_the_table():
    tile = {"best": {"rows": 64}, "candidates_ms": [1.0]}
    lines = table(
        {
            "device": "NVIDIA H200",
            "GB_per_s/8b-int4-8192": {"encode": 1500.0, "decode": 3000.0, "copy": 4000.0},
            "GB_per_s/8b-int8-8192": "OutOfMemoryError: 1 | 2",
            "GB_per_s/70b-int8-8192": None,
            "restore_ms/8b-int4-8192": {"device": 0.5, "pinned": 6.0, "raw": 24.0},
            "check/bands": True,
            "check/align": False,
            "tuned/8b-int4": {"decode_keys": tile},
        }
    ).splitlines()
    assert "Device: **NVIDIA H200**" in lines
    assert "| 8b-int4-8192 | 1500 | 3000 | 4000 | 0.75 |" in lines
    assert "| 8b-int8-8192 | OutOfMemoryError: 1 / 2 |  |  |  |" in lines
    assert "| 70b-int8-8192 |  |  |  |  |" in lines
    assert "| 8b-int4-8192 | 0.5 | 6 | 24 | 4.00 |" in lines
    assert "| check/bands | same bits |" in lines
    assert "| check/align | **differs** |" in lines
    assert "| tuned/8b-int4 | decode_keys: {'rows': 64} |" in lines


@pytest.mark.parametrize("name", ["smollm", "phi-2"])
def test_checks_pass_and_tell_wrong_bits(name, device, monkeypatch):
    assert device_check.check(SHAPES[name], 4, device)
    assert device_kernels.check_unit(SHAPES[name], device)
    assert device_kernels.check_rotated(SHAPES[name], device)
    assert device_kernels.check_bands(device)
    assert device_kernels.check_align(device)
    monkeypatch.setattr(device_kernels.rotated, "decode", lambda norms, codes, bits, dim: torch.zeros(100, 1, dim))
    assert not device_kernels.check_rotated(SHAPES[name], device)
