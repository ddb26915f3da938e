"""ServerProcess against a stand-in for ``sglang.launch_server`` that starts at once and has a child to leave behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_plt.client import RequestError, parse_metrics
from sglang_plt.serving import ServerProcess, ServerStartError, free_port, group_members, port_in_use

FAKE = """
import http.server, json, os, signal, subprocess, sys, time

mode = os.environ.get("FAKE", "")
signal.alarm(120)  # outlives no test, come what may
print("starting", sys.argv[1:], flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
if mode == "die":
    raise RuntimeError("no such model")
if mode == "hang":
    time.sleep(120)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_GET(self):
        Handler.requests += 1
        if self.path == "/ready":
            self.reply(200 if Handler.requests > 2 else 503, b"")
        elif self.path == "/metrics":
            self.reply(200, b'# HELP\\nsglang:plt_tokens{tier="hot",tp_rank="0"} 3.0\\n')
        else:
            self.reply(200, json.dumps({"path": self.path}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/bad":
            self.reply(400, b"this is why")
        elif self.path == "/stream":
            self.reply(200, b'data: {"a": 1}\\n\\ndata: {"a": 2}\\n\\ndata: [DONE]\\n\\n')
        elif self.path == "/broken":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'data: {"a": 1}\\n\\n')
        else:
            self.reply(200, json.dumps({"body": body}).encode())

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a ServerProcess of the stand-in; ``mode`` is what it does wrong."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(FAKE)
    monkeypatch.setattr("sglang_plt.serving.STOP_GRACE_S", 1.0)
    made = []

    def make(mode="", **kwargs):
        env = {"PYTHONPATH": str(tmp_path), "FAKE": mode}
        server = ServerProcess(["--model-path", "m"], log_path=tmp_path / "server.log", env=env, **kwargs)
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()
        assert_gone(server)


def assert_gone(server):
    if server.process is not None:
        assert server.process.poll() is not None
        assert group_members(server.process.pid) == []


def test_a_server_is_started_asked_and_ended_with_its_child(fake):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with fake() as server:
        assert server.alive
        assert len(group_members(server.process.pid)) == 2
        assert server.get_json("/x") == {"path": "/x"}
        assert server.post_json("/y", {"b": [1]}) == {"body": {"b": [1]}}
        assert list(server.stream_json("/stream", {})) == [{"a": 1}, {"a": 2}]
        assert server.metrics() == {"tokens_hot": 3.0}
        server.flush_cache()
        assert f"'--port', '{server.port}'" in server.log_tail(1)[0]
        assert port_in_use(server.port)
        with pytest.raises(RequestError, match="POST /bad: status 400: this is why") as caught:
            server.post_json("/bad", {})
        assert (caught.value.status, caught.value.body) == (400, "this is why")
        with pytest.raises(ConnectionError, match="broke off"):
            server.post_json("/broken", {})
    assert_gone(server)
    assert not server.alive
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    with pytest.raises(OSError, match="refused"):
        server.get_json("/x")
    with pytest.raises(RuntimeError, match="starts once"):
        server.start()


def test_a_server_that_dies_early_shows_its_last_lines(fake):
    server = fake("die")
    with pytest.raises(ServerStartError) as caught:
        server.start()
    assert caught.value.summary == (
        f"the server ended with status 1 before it was ready: RuntimeError: no such model (log: {server.log_path})"
    )
    assert caught.value.tail[-1] == "RuntimeError: no such model"
    assert "  | RuntimeError: no such model" in str(caught.value)
    assert_gone(server)


def test_a_server_that_is_never_ready_is_given_up(fake):
    seen = []
    server = fake("hang", timeout_s=2.5, progress=lambda seconds, line: seen.append((seconds, line)))
    with pytest.raises(ServerStartError, match="not ready after 2 s"):
        server.start()
    assert len(seen) == 2
    assert seen[-1][1].startswith("starting")
    assert_gone(server)


def test_a_server_that_ignores_sigterm_is_killed(fake):
    with fake("stubborn") as server:
        pass
    assert server.process.returncode == -signal.SIGKILL


def test_children_of_a_crashed_server_are_killed(fake):
    with fake() as server:
        server.process.kill()
        server.process.wait()
        assert len(group_members(server.process.pid)) == 1
    assert_gone(server)


def test_a_port_in_use_is_named_before_anything_starts(fake):
    with fake() as first:
        second = fake(port=first.port)
        with pytest.raises(ServerStartError, match=f"port {first.port} is in use"):
            second.start()
        assert second.process is None
        assert first.alive
    assert not port_in_use(free_port())
    assert port_in_use(1 << 20)


@pytest.mark.parametrize("when", ["starting", "running"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_no_signal_leaves_a_server_behind(fake, tmp_path, number, when):
    script = tmp_path / "user.py"
    script.write_text(
        "import os, signal, time\n"
        "from pathlib import Path\n"
        # a shell's background job, or nohup, ignores some of them
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from sglang_plt import serving\n"
        "serving.STOP_GRACE_S = 1.0\n"
        "mode = os.environ.pop('WHEN')\n"
        "env = {'PYTHONPATH': os.environ['FAKE_DIR'], 'FAKE': 'hang' if mode == 'starting' else ''}\n"
        "server = serving.ServerProcess([], env=env, log_path=Path(os.environ['FAKE_DIR']) / 'log', "
        "progress=lambda seconds, line: print(server.process.pid, flush=True))\n"
        "with server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(120)\n"
    )
    env = {**os.environ, "FAKE_DIR": str(tmp_path), "WHEN": when}
    user = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    group = int(user.stdout.readline())
    try:
        assert group_members(group)
        time.sleep(0.1)
        user.send_signal(number)
        # a signal that ends a program ends it as that signal; Python does so for Ctrl-C as well
        assert user.wait(timeout=30) == -number
        assert group_members(group) == []
    finally:
        user.kill()
        user.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_an_ignored_hangup_stays_ignored(fake):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with fake() as server:
            signal.raise_signal(signal.SIGHUP)
            assert server.alive
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_metrics_of_one_rank_without_buckets():
    text = (
        '# TYPE sglang:plt_tokens gauge\nsglang:plt_tokens{tier="hot",tp_rank="0"} 12.0\n'
        'sglang:plt_tokens{tier="hot",tp_rank="1"} 13.0\nsglang:plt_restored_tokens_total{tp_rank="0"} 5.0\n'
        'sglang:plt_restore_seconds_bucket{le="0.1",tp_rank="0"} 1.0\n'
        'sglang:plt_restore_seconds_sum{tp_rank="0"} 0.25\nsglang:other{tp_rank="0"} 1.0\n'
    )
    assert parse_metrics(text, rank=0) == {
        "tokens_hot": 12.0,
        "restored_tokens_total": 5.0,
        "restore_seconds_sum": 0.25,
    }
    assert parse_metrics(text, rank=1) == {"tokens_hot": 13.0}
