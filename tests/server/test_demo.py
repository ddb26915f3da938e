"""The demo without a server: what it asks, counts, prints and refuses."""

import json
import socket

import pytest

from sglang_plt import cli
from sglang_plt.client import RequestError
from sglang_plt.demo import HEADER, Chat, DemoError, DemoOptions, run_demo, table_line
from sglang_plt.results import Row, read_rows, write_rows

METRICS = {"cold_budget_bytes": 2.0 * 300 * 1000, "restored_tokens_total": 200.0, "decoded_bytes_total": 50_000.0}


class Stub:
    """Answers like a server whose prompts have one token a word: 100 restored from the second turn of a user on."""

    alive = True
    log_path = "the.log"

    def __init__(self, metrics=METRICS, error=None):
        self._metrics, self._error, self.prompts = metrics, error, []

    def metrics(self):
        return self._metrics

    def stream_json(self, path, payload):
        assert path == "/v1/chat/completions"
        assert payload["temperature"] == 0
        if self._error is not None:
            raise self._error
        self.prompts.append(json.dumps(payload["messages"]))
        words = sum(len(message["content"].split()) for message in payload["messages"])
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield {"choices": [{"delta": {"content": "In "}}]}
        yield {"choices": [{"delta": {"content": "Graz."}}]}
        if len(payload["messages"]) > 2:
            yield {"choices": [], "sglext": {"cached_tokens_details": {"device": 7, "host": 100}}}
        yield {"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": 4}}


@pytest.fixture
def options(tmp_path):
    return DemoOptions(tmp_path, users=3, turns=2, max_total_tokens=300)


def test_histories_are_append_only_and_reproducible(options):
    first, second = Stub(), Stub()
    run_demo(options, first, lambda turn: None)
    run_demo(options, second, lambda turn: None)
    assert first.prompts == second.prompts
    assert len(set(first.prompts)) == 6
    for user in range(3):
        earlier, later = first.prompts[user], first.prompts[3 + user]
        assert later.startswith(earlier.removesuffix("]"))
        assert '{"role": "assistant", "content": "In Graz."}' in later


def test_users_differ_from_the_first_sentence_on():
    chats = [Chat.make(index, 7, 0) for index in range(8)]
    assert len({chat.messages[0]["content"][:40] for chat in chats}) == 8
    assert len({chat.name for chat in chats}) == 8
    assert all(len(chat.questions) == 7 for chat in chats)
    assert Chat.make(0, 3, 0) != Chat.make(0, 3, 1)


def test_numbers_and_summary(options):
    seen = []
    result = run_demo(options, Stub(), seen.append)
    assert seen == result.turns
    prompt = result.total("prompt")
    assert result.total("device") == 3 * 7
    assert result.total("restored") == 3 * 100
    assert result.total("computed") == prompt - 321
    assert result.held_tokens == sum(turn.prompt + 4 for turn in seen[3:])
    rows = {row.metric: row for row in result.rows()}
    assert set(rows) == {
        *("device_share", "restored_share", "computed_share", "prompt_tokens", "pool_tokens"),
        *("pool_bytes_per_token", "cold_bytes_per_token", "ttft_p50_restored", "ttft_p50_computed"),
    }
    assert {row.arm for row in rows.values()} == {"plt-int8"}
    assert rows["restored_share"].value == 300 / prompt
    assert rows["restored_share"].n == 6
    assert rows["cold_bytes_per_token"] == Row("cold_bytes_per_token", "plt-int8", 250.0, "bytes", n=300)
    assert rows["pool_bytes_per_token"].value == 1000
    text = "\n".join(result.summary())
    assert "250 bytes a token as int8, 1000 in the pool: 4.0 times smaller" in text
    assert "all that was still in the pool" in text
    assert "In Graz." in "\n".join(result.sample())


def test_table_lines_up(options):
    turn = run_demo(options, Stub(), lambda turn: None).turns[0]
    line = table_line(turn)
    for word, value in (("prompt", turn.prompt), ("restored", 0), ("computed", turn.computed), ("turn", 1)):
        end = HEADER.index(word) + len(word)
        assert line[:end].endswith(f" {value}"), (word, line)
    assert line[HEADER.index("user") :].startswith(turn.user)
    assert line[HEADER.index("reply") :] == "In Graz."


def test_nothing_restored_is_said(options):
    result = run_demo(options, Stub({**METRICS, "restored_tokens_total": 0.0}), lambda turn: None)
    assert "nothing was restored" in "\n".join(result.summary())
    assert "cold_bytes_per_token" not in {row.metric for row in result.rows()}


def test_a_refused_request_and_a_dead_server_are_one_line(options):
    with pytest.raises(DemoError, match=r"refused a request, see the\.log: POST /x: status 400: too long"):
        run_demo(options, Stub(error=RequestError("POST /x", 400, "too\nlong")), lambda turn: None)
    with pytest.raises(DemoError, match="does not answer"):
        run_demo(options, Stub(error=ConnectionError("reset")), lambda turn: None)
    dead = Stub(error=ConnectionError("reset"))
    dead.alive = False
    with pytest.raises(DemoError, match=r"has died, see the\.log"):
        run_demo(options, dead, lambda turn: None)


def test_the_pool_is_sized_for_overflow(tmp_path):
    six = DemoOptions(tmp_path)
    assert 3 < 6 * (170 + 3 * 50) / six.pool_tokens < 4
    assert DemoOptions(tmp_path, users=1).pool_tokens > 170 + 3 * 50
    assert DemoOptions(tmp_path, max_total_tokens=999).pool_tokens == 999
    args = six.server_args(on_gpu=False)
    assert args[args.index("--radix-cache") + 1] == "plt"
    assert args[args.index("--plt-codec") + 1] == "int8"
    assert "cpu" not in six.server_args(on_gpu=True)


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--users", "0"], "--users=0 must be at least 1"),
        (["--turns", "-1"], "--turns=-1 must be at least 1"),
        (["--max-total-tokens", "100"], "does not hold one conversation of 3 turns: give at least 320"),
        (["--codec", "int3"], "invalid choice: 'int3'"),
        (["--json", "/no/such/dir/x.json"], "--json=/no/such/dir/x.json: /no/such/dir is not a directory"),
        (["--model-path", "/no/such/model"], "--model-path=/no/such/model is not a model directory"),
    ],
)
def test_wrong_options_are_one_line(argv, expected, model, capsys):
    assert cli.main(["demo", "--model-path", str(model), *argv]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_one_line(model, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--model-path", str(model), "--port", str(port)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"sglang-plt: error: port {port} is in use")


def test_a_server_that_dies_shows_its_last_lines(model, tmp_path, monkeypatch, capsys):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "print('loading')\nraise ValueError('no such architecture')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("sglang_plt.cli.demo._has_gpu", lambda: False)
    assert cli.main(["demo", "--model-path", str(model)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "  | loading" in lines
    assert lines[-1].startswith(
        "sglang-plt: error: the server ended with status 1 before it was ready: ValueError: no such"
    )


def test_the_command_prints_table_summary_and_json(model, tmp_path, monkeypatch, capsys):
    class StubServer(Stub):
        port = 1

        def __init__(self, args, port, env, progress):
            super().__init__()

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

    monkeypatch.setattr("sglang_plt.serving.ServerProcess", StubServer)
    monkeypatch.setattr("sglang_plt.cli.demo._has_gpu", lambda: False)
    target = tmp_path / "out.json"
    assert cli.main(["demo", "--model-path", str(model), "--users", "2", "--json", str(target)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == HEADER
    assert len([line for line in out if line.endswith("In Graz.") and " s " in line]) == 6
    assert {row.metric for row in read_rows(target)} >= {"device_share", "restored_share", "computed_share"}


def test_rows_round_trip_and_are_checked(tmp_path):
    rows = [Row("a", "x", 1.5, "ms", 1.0, 2.0, 9), Row("b", "y", 0.25, "1")]
    write_rows(tmp_path / "r.json", rows)
    assert read_rows(tmp_path / "r.json") == rows
    assert json.loads((tmp_path / "r.json").read_text())["rows"][1] == {
        **{"metric": "b", "arm": "y", "value": 0.25, "unit": "1"},
        **{"lo": None, "hi": None, "n": 1},
    }
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    with pytest.raises(ValueError, match="finite"):
        Row("a", "x", float("nan"), "ms")
    with pytest.raises(ValueError, match="both or none"):
        Row("a", "x", 1.0, "ms", lo=0.5)
    (tmp_path / "other.json").write_text('{"rows": [{"metric": "a"}]}')
    with pytest.raises(ValueError, match="not a file of rows"):
        read_rows(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        write_rows(tmp_path / "no" / "r.json", rows)
