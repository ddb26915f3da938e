"""What a benchmark leaves: files, figures, a page that loads nothing, and a table."""

import json
import re
from html.parser import HTMLParser

import pytest

from bench_serving import bench, noise
from bench_serving.bench_files import Directory
from bench_serving.bench_report import write_report
from bench_serving.report_markdown import noise_sentence, table, verdicts
from sglang_plt.results import read_rows
from tests.bench_serving.bench_data import make_directory, make_run

PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and gathers what could load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.cells, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "span"):
            self.cells.append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    make_directory(root, slow_probe="plt-raw")
    rows, text = write_report(root)
    return root, rows, text


def test_records_and_notes_survive(tmp_path):
    run = make_directory(tmp_path, repeats=2)
    read, found = Directory(tmp_path).read()
    assert read == run
    assert len(found) == 6
    assert list(found["chat", "plt-raw", "fits"]) == [0, 1]
    assert (tmp_path / "records/chat/plt-raw/fits/1.jsonl").is_file()


@pytest.mark.parametrize("text", ["{", "[]", '{"notes": [{"colour": 1}]}', "{}"])
def test_what_is_no_benchmark(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"Expecting|does not describe a benchmark"):
        Directory(tmp_path).read()


def test_figures(report):
    root, _, _ = report
    for name in ("bytes.png", "context.png", "warm.png"):
        assert (root / name).read_bytes().startswith(PNG)
        assert (root / name).stat().st_size > 10_000


def test_the_page_loads_nothing(report):
    root, _, _ = report
    text = (root / "report.html").read_text()
    page = Page(text)
    assert len(page.loads) == 3
    assert all(value.startswith("data:image/png;base64,") for value in page.loads)
    without_figures = re.sub(r'"data:image/png;base64,[^"]*"', "", text)
    assert not re.search(r"https?:|//|url\(|@import|<script|<link", without_figures)
    assert "Model: none <really>." in page.text  # escaped
    assert {"chat/plt-dense/pressure", "met", "disturbed"} <= set(page.cells)


def test_the_page_tells_what_was_disturbed(report, tmp_path):
    root, _, text = report
    sentence = "DISTURBED: 2 of 6 servers saw"
    assert sentence in Page((root / "report.html").read_text()).text
    assert sentence in text
    run = make_directory(tmp_path)
    assert noise_sentence(run).startswith("Undisturbed: none of 6")
    assert noise_sentence(make_run()) == "No server was measured to its end."


def test_the_table(report):
    root, _, text = report
    assert (root / "table.md").read_text() == text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + 6
    assert lines[2].startswith("| chat | pressure | `default` | 16.8 % | 1,150 | 1,300 | 1.64 | 0.0 % | - | - | - |")
    assert "| 0.250 [0.250, 0.250] |" in lines[4]


def test_verdicts(report):
    found = {(v.arm, v.metric): v.verdict for v in verdicts(Directory(report[0]).read()[0], report[1])}
    assert found["chat/plt-dense/pressure", "cached_share_ratio"] == "met"
    assert found["chat/plt-dense/pressure", "ttft_p50_ratio"] == "met"
    assert found["chat/plt-dense/fits", "ttft_p50_ratio"] == "met"
    assert found["chat/plt-dense/fits", "throughput_ratio"] == "met"
    assert {arm.split("/")[1] for arm, _ in found} == {"plt-dense"}


def test_one_arm_alone_has_no_ratios(tmp_path):
    run = make_run(arms=["server"])
    text = table(run, [])
    assert "default" not in text


def test_the_report_again(report, tmp_path, capsys):
    root, rows, text = report
    (root / "report.html").unlink()
    bench.main(["--report-only", str(root), "--json", str(tmp_path / "rows.json")])
    assert text in capsys.readouterr().out
    assert (root / "report.html").is_file()
    assert read_rows(tmp_path / "rows.json") == read_rows(root / "rows.json") == rows


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--arms", "int3"], "arm 'int3' is unknown"),
        (["--json", "/no/such/dir/x.json"], "/no/such/dir is not a directory"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--report-only", "/no/such/dir"], "/no/such/dir is not a directory"),
        (["--output", "FULL"], "is not empty: choose another directory"),
        (["--scale", "0.2", "--pressure", "--output", "NEW"], "take a larger --scale"),
    ],
)
def test_wrong_options_end_with_one_line(argv, expected, report, tmp_path, demo_model_dir, capsys):
    paths = {"FULL": str(report[0]), "NEW": str(tmp_path / "new")}
    with pytest.raises(SystemExit) as ended:
        bench.main([paths.get(word, word) for word in argv] + ["--model-path", str(demo_model_dir)])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_a_server_that_runs_already(fake, demo_model_dir, tmp_path, capsys, api):
    """It cannot be flushed, and is measured all the same."""
    argv = [
        "--url",
        fake.url + "/",
        "--api",
        api,
        "--scale",
        "0.1",
        "--name",
        "fake",
        "--output",
        str(tmp_path / "out"),
    ]
    bench.main([*argv, "--model-path", str(demo_model_dir)])
    printed = capsys.readouterr()
    assert "has no /flush_cache" in printed.err
    assert "| multi_turn | as-is | `fake` |" in printed.out
    rows = {(row.metric, row.arm): row for row in read_rows(tmp_path / "out/rows.json")}
    assert rows["failed_share", "agents/fake/as-is"].value == 0
    assert rows["cached_share", "multi_turn/fake/as-is"].value > 0
    assert not (tmp_path / "out/bytes.png").exists()
    assert (tmp_path / "out/warm.png").is_file()
    lines = (tmp_path / "out/records/multi_turn/fake/as-is/0.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert json.loads(lines[0])["prompt_tokens"] == 96 + 760 + 40


def test_the_probe_and_the_others():
    assert 0 < noise.probe(1 << 20) < 5
    others = noise.Others(list)
    noise.probe(1 << 20)
    share = others.share()
    assert share is None or share >= 0
