"""Records survive the way to disk and back, and a wrong line is named."""

import pytest

from bench_serving.records import Record, read_records, write_records

WHOLE = Record(
    session="agent-1",
    turn=2,
    prompt_tokens=100,
    started_at=1_700_000_000.25,
    e2e_s=2.5,
    ttft_s=0.5,
    inter_token_s=(0.1, 0.2),
    output_ids=(5, 6, 7),
    cached_tokens=80,
    cached_tokens_details={"device": 30, "host": 50},
)
FAILED = Record("agent-2", 0, 100, 1.0, 3.0, error="no whole answer after 3 s")


def test_round_trip(tmp_path):
    write_records(tmp_path / "r.jsonl", [WHOLE, FAILED])
    assert read_records(tmp_path / "r.jsonl") == [WHOLE, FAILED]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 2


def test_what_failed_computed_nothing_that_is_known():
    assert (WHOLE.ok, WHOLE.computed_tokens) == (True, 20)
    assert (FAILED.ok, FAILED.computed_tokens) == (False, 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "Expecting"),
        ("[]", "a record is a JSON object, got list"),
        ('{"session": "x"}', "missing"),
        ('{"session": "x", "colour": 1}', "unknown field colour"),
    ],
)
def test_a_wrong_line_is_named(line, expected, tmp_path):
    path = tmp_path / "r.jsonl"
    write_records(path, [WHOLE])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"r\.jsonl:2: .*{expected}"):
        read_records(path)


def test_no_number_that_json_lacks(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_records(tmp_path / "r.jsonl", [Record("x", 0, 1, 0.0, float("nan"))])
