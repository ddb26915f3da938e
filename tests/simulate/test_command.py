"""``sglang-plt simulate``."""

import json
import sys

import pytest

from sglang_plt import cli
from sglang_plt.results import read_rows


def run(*argv: object) -> int:
    return cli.main(["simulate", *map(str, argv)])


@pytest.fixture
def trace(tmp_path, capsys):
    path = tmp_path / "agents.jsonl"
    assert run("--generate", "agents", "--seed", 1, "--requests", 300, path) == 0
    assert capsys.readouterr().out == f"{path}\n"
    return path


def test_one_line_and_the_same_rows_for_every_combination(trace, tmp_path, capsys):
    found = tmp_path / "rows.json"
    policies = ("value", "lru", "tlru", "belady")
    sizes = ("--capacity", "50k", "0.2M", "--codec-ratio", 1, 7.5)
    assert run(trace, *sizes, "--policy", *policies, "--json", found) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 2 * 4
    rows = {(row.metric, row.arm): row for row in read_rows(found)}
    for policy in policies:
        for capacity in (50000, 200000):
            for ratio in ("x1", "x7.5"):
                arm = f"agents/{policy}/{capacity}/{ratio}"
                assert 0 <= rows["hit_rate", arm].value <= 1
                assert rows["hit_rate", arm].unit == "1"
                tiers = rows["hot_hit_rate", arm].value, rows["cold_hit_rate", arm].value
                assert sum(tiers) == pytest.approx(rows["hit_rate", arm].value)
                assert tiers[ratio == "x1"] == 0
    assert ("policy_us_per_evicted_token", "agents/value/50000/x1") in rows
    assert ("policy_us_per_evicted_token", "agents/belady/50000/x1") not in rows


def test_plot(trace, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "hits.png"
    assert run(trace, "--capacity", "50k", "100k", "--policy", "lru", "belady", "--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(trace, "--capacity", "50k", "--policy", "lru", "--plot", tmp_path / "hits.png") == 2
    assert "needs matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--capacity", "0"), "--capacity=0 must be a whole number"),
        (("--capacity", "1.5"), "--capacity=1.5 must be a whole number"),
        (("--capacity", "1e6"), "--capacity=1e6 must be"),
        (("--capacity", "100"), "does not hold one unit of 512 tokens"),
        (("--codec-ratio", "0.5"), "--codec-ratio=0.5 must be a number, at least 1"),
        (("--codec-ratio", "inf"), "--codec-ratio=inf must be"),
        (("--policy", "best"), "invalid choice: 'best'"),
        (("--prefill-rate", "-1"), "--prefill-rate"),
        (("--json", "no/such/dir.json"), "is not a directory"),
        (("--plot", "no/such/dir.png"), "is not a directory"),
    ],
)
def test_bad_arguments(trace, capsys, argv, message):
    assert run(trace, *argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_bad_traces_are_named_with_their_line(trace, tmp_path, capsys):
    with trace.open("a") as out:
        out.write(json.dumps({"timestamp": 1 << 40, "input_length": 5})[:-3])
    assert run(trace) == 2
    assert f"sglang-plt: error: {trace}:301: not a whole JSON object" in capsys.readouterr().err
    assert run(tmp_path / "absent.jsonl") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert run("--generate", "agents", trace, tmp_path / "two.jsonl") == 2
    assert "writes one trace" in capsys.readouterr().err


def test_traces_of_one_name_are_refused(trace, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / trace.name).write_bytes(trace.read_bytes())
    assert run(trace, tmp_path / "other" / trace.name) == 2
    assert "two traces are called agents" in capsys.readouterr().err
