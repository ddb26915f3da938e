"""Traces in Mooncake's format as a workload: prefixes, times, and lines that are wrong."""

import json
import re

import pytest

from bench_serving.workloads import ModelTokenizer, Trace


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir):
    return ModelTokenizer(demo_model_dir)


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 700, "output_length": 0, "hash_ids": [7, 8]},
        {"timestamp": 3000, "input_length": 1025, "output_length": 9, "hash_ids": [7, 8, 1]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_traces(tokenizer, trace_file):
    sessions = Trace(trace_file).sessions(tokenizer)
    prompts = [session.turns[0].append for session in sessions]
    assert [len(ids) for ids in prompts] == [1024, 700, 1025]
    assert [session.turns[0].max_new_tokens for session in sessions] == [5, 1, 9]
    assert [session.start_s for session in sessions] == [0.0, 0.5, 2.0]
    assert prompts[0][:700] == prompts[1]
    assert prompts[2][:1024] == prompts[0]
    assert all(0 <= token < tokenizer.vocab_size for ids in prompts for token in ids)
    assert sessions == Trace(trace_file).sessions(tokenizer)
    assert Trace(trace_file, seed=1).sessions(tokenizer)[0].turns != sessions[0].turns
    scaled = Trace(trace_file, time_scale=0.5, limit=2).sessions(tokenizer)
    assert [session.start_s for session in scaled] == [0.0, 0.25]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "Expecting"),
        ("[1]", "list indices"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "'hash_ids' is missing"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "makes 2 blocks"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length=0 must be"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}', "hash_ids holds 'x'"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line, expected, tokenizer, tmp_path, trace_file):
    path = tmp_path / "wrong.jsonl"
    path.write_text(trace_file.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + ".*" + re.escape(expected)):
        Trace(path).sessions(tokenizer)


def test_traces_that_go_back_or_are_empty(tokenizer, tmp_path, trace_file):
    lines = trace_file.read_text().splitlines()
    (tmp_path / "back.jsonl").write_text("\n".join([lines[1], lines[0]]))
    with pytest.raises(ValueError, match=r":2: timestamp=1000\.0 is before 1500\.0"):
        Trace(tmp_path / "back.jsonl").sessions(tokenizer)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="holds no request"):
        Trace(tmp_path / "empty.jsonl").sessions(tokenizer)
