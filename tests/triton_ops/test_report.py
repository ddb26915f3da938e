"""The report on the Triton kernels: what it counts, what it calls worse, that the committed one is of these kernels."""

import json
import os
import subprocess
import sys

import pytest

from tests.tiny_model import REPO
from triton_ops.report.__main__ import REPORT, main
from triton_ops.report.rows import regressions, rows_of

RECORD = {
    "kernel": "triton_ops.op.kernel:decode_kernel",
    "config": "shape",
    "read": 30.0,
    "written": 20.0,
    "operands": 0.0,
    "minimum": 40.0,
    "flops": 100.0,
    "dot_flops": 0.0,
    "compiled": {"90": {"registers": 64, "spills": 0, "shared_bytes": 128}},
}


def row(metric, value, arm="decode/shape/sm_90"):
    return {"metric": metric, "arm": arm, "value": value, "unit": "", "lo": None, "hi": None, "n": 1}


def test_rows_name_kernel_configuration_and_target():
    rows = {row["metric"]: row for row in rows_of([RECORD])}
    assert {row["arm"] for row in rows.values()} == {"decode/shape/sm_90"}
    assert rows["bytes_per_row_over_minimum"]["value"] == 1.25
    assert rows["bytes_per_row_over_minimum"]["unit"] == "ratio"
    assert rows["roofline_ns_per_row"]["value"] == pytest.approx(50 / 3.35e12 * 1e9, abs=1e-6)
    assert set(rows["spills"]) == {"metric", "arm", "value", "unit", "lo", "hi", "n"}


def test_what_is_worse_is_a_regression():
    committed = [row("registers", 64), row("spills", 0), row("bytes_per_row_over_minimum", 1.25)]
    assert regressions(committed, committed) == []
    better = [row("registers", 60), row("spills", 0), row("bytes_per_row_over_minimum", 1.2)]
    assert regressions(better, committed) == []
    assert regressions([row("registers", 65)], committed) == ["decode/shape/sm_90: registers 65, was 64"]
    assert "1.3, was 1.25" in regressions([row("bytes_per_row_over_minimum", 1.3)], committed)[0]
    spilled = [row("spills", 8)]
    assert regressions(spilled, spilled) == ["decode/shape/sm_90: 8 bytes spilled, must be 0"]
    assert regressions([row("registers", 1, "new/shape/sm_90")], []) == ["new/shape/sm_90: not in the committed report"]
    assert regressions([], committed) == ["decode/shape/sm_90: in the committed report only"]


def test_committed_report_spills_nowhere_and_covers_every_target():
    rows = json.loads(REPORT.read_text())["rows"]
    assert all(row["value"] == 0 for row in rows if row["metric"] == "spills")
    targets = {arm: set() for arm in {row["arm"].rsplit("/", 1)[0] for row in rows}}
    for one in rows:
        kernel, target = one["arm"].rsplit("/", 1)
        targets[kernel].add(target)
    assert all(found == {"sm_80", "sm_90", "sm_100"} for found in targets.values())
    assert {kernel.split("/")[0] for kernel in targets} == {
        "add_rows",
        "copy_exact",
        "decode_keys",
        "decode_rotated",
        "decode_values",
        "encode_keys",
        "encode_values",
        "outliers",
        "synthesise",
        "unpack",
    }


def test_one_configuration_compiles_to_what_the_report_says(capsys):
    assert main(["--only", "llama-70b-tp8-int4"]) == 0, capsys.readouterr().err
    assert "decode_keys/llama-70b-tp8-int4/sm_100" in capsys.readouterr().out


def test_traced_bytes_are_those_that_a_launch_must_move():
    command = [sys.executable, "-m", "triton_ops.report.trace", "llama-8b-encode"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=REPO, capture_output=True, text=True, check=True
    )
    for record in json.loads(done.stdout):
        assert record["kernel"].endswith(":copy_exact_kernel")
        assert record["written"] == 8 * 128 * 2  # a bfloat16 row
        assert record["minimum"] == 2 * record["written"]
        assert record["minimum"] < record["read"] + record["written"] < 1.02 * record["minimum"]  # its slot, its block
