"""What a trace may hold, and the line that is named when it does not."""

import json
from array import array

import pytest

from sglang_plt.simulate.agents import agent_requests
from sglang_plt.simulate.trace import BLOCK_TOKENS, TraceError, read_trace
from tests.simulate.traces import generated

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
TOKENS = {"timestamp": 5, "output_length": 3, "tokens": [1, 2, 3]}


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


BAD_LINES = {
    "truncated": (json.dumps(GOOD)[:-9], "not a whole JSON object"),
    "empty": ("", "not a whole JSON object"),
    "nested": ("[" * 100_000, "not a whole JSON object"),
    "list": ("[1]", "a request is a JSON object, got list"),
    **{f"no {name}": (without(name), f"field '{name}' is missing") for name in ("timestamp", "output_length")},
    "no input_length": (without("input_length"), "field 'input_length' is missing"),
    "no hash_ids": (without("hash_ids"), "field 'hash_ids' is missing"),
    "negative input": (json.dumps(GOOD | {"input_length": -1}), "input_length=-1 must lie in 1.."),
    "negative output": (json.dumps(GOOD | {"output_length": -2}), "output_length=-2 must lie in 0.."),
    "huge input": (json.dumps(GOOD | {"input_length": 1 << 50}), "must lie in 1.."),
    "fraction": (json.dumps(GOOD | {"input_length": 600.5}), "must be a whole number"),
    "boolean": (json.dumps(GOOD | {"output_length": True}), "must be a whole number"),
    "wrong number of ids": (json.dumps(GOOD | {"hash_ids": [1]}), "makes 2 blocks of 512 tokens, hash_ids has 1"),
    "huge id": (json.dumps(GOOD | {"hash_ids": [1, 1 << 63]}), "an id is a whole number in 0.."),
    "negative id": (json.dumps(GOOD | {"hash_ids": [1, -2]}), "hash_ids holds -2"),
    "text id": (json.dumps(GOOD | {"hash_ids": [1, "2"]}), "an id is a whole number"),
    "no ids": (json.dumps(GOOD | {"hash_ids": []}), "a list of at least one id"),
    "earlier": (json.dumps(GOOD | {"timestamp": 4}), "timestamp=4 is before 5 of an earlier line"),
    "negative time": (json.dumps(GOOD | {"timestamp": -1}), "timestamp=-1 must be a number"),
    "infinite time": (json.dumps(GOOD | {"timestamp": float("inf")}), "must be a number"),
    "no number": (json.dumps(GOOD | {"timestamp": float("nan")}), "must be a number"),
    "mixed": (json.dumps(TOKENS), "field 'input_length' is missing"),
    "not UTF-8": (b'{"timestamp": "\xff', "not a whole JSON object"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n" + json.dumps(GOOD).encode() + b"\n")
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(tmp_path / "empty.jsonl")


def test_blocks(tmp_path):
    full = GOOD | {"input_length": 1024, "hash_ids": [1, 3]}
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(full) + "\n")
    trace = read_trace(tmp_path / "good.jsonl")
    assert (trace.name, trace.unit_tokens, trace.asked_tokens) == ("good", BLOCK_TOKENS, 2048)
    assert [list(request.units) for request in trace.requests] == [[1, 2], [1, 3]]
    assert [request.partial for request in trace.requests] == [True, False]


def test_tokens_become_pages_that_know_their_prefix(tmp_path):
    lines = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 9, 3, 4], [7]]
    text = "".join(json.dumps({"timestamp": 0, "output_length": 1, "tokens": tokens}) + "\n" for tokens in lines)
    (tmp_path / "tokens.jsonl").write_text(text)
    trace = read_trace(tmp_path / "tokens.jsonl", page_tokens=2)
    assert [request.units for request in trace.requests] == [array("q", ids) for ids in ([0, 1], [0, 1], [2, 3], [])]
    assert (trace.unit_tokens, trace.asked_tokens) == (2, 14)


def test_generated_traces_repeat_by_seed_and_hold_what_they_promise(tmp_path):
    first, again = list(agent_requests(3, 400)), list(agent_requests(3, 400))
    assert first == again
    assert first != list(agent_requests(4, 400))
    trace = generated(tmp_path)
    assert len(trace.requests) == 1500
    heads = {request.units[0] for request in trace.requests}
    assert len(heads) <= 6, "every session starts with a shared preamble"
    children: dict[int, set[int]] = {}
    for request in trace.requests:
        for unit, following in zip(request.units, request.units[1:], strict=False):
            children.setdefault(unit, set()).add(following)
    assert sum(len(found) > 1 for found in children.values()) > 50, "sessions grow and fork"
