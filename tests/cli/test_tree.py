"""``sglang-plt tree`` against a server that answers what SGLang's routes answer."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_plt import cli
from sglang_plt.serving import free_port
from tests.cli.test_tree_view import make_tree


class FakeServer(ThreadingHTTPServer):
    """Answers ``/server_info``, ``/set_internal_state`` and ``/v1/detokenize``; behaviour by attributes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.backend: str | None = "plt"
        self.key: str | None = None
        self.accepts = [True]
        self.lost = 0  # snapshots that another reader takes away
        self.has_tokenizer = True
        self.body: bytes | None = None
        self.wanted: dict | None = None
        self.asked: list[dict] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args) -> None:
        pass

    def _answer(self, payload, status: int = 200) -> None:
        body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def _may(self) -> bool:
        if self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self._answer({"error": "Unauthorized"}, 401)
        return False

    def do_GET(self) -> None:
        server = self.server
        if not self._may():
            return
        if server.body is not None:
            self._answer(server.body)
            return
        states: list[dict] = [{} for _ in server.accepts]
        if server.wanted is not None:
            if server.lost:
                server.lost -= 1
            else:
                preview = server.wanted["plt_tree_tokens"]
                tree = make_tree(max_nodes=server.wanted["plt_tree"], token_preview=preview)
                states = [{"plt_tree": tree} for _ in server.accepts]
            server.wanted = None
        self._answer({"radix_cache_backend": server.backend, "internal_states": states})

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._may():
            return
        if self.path == "/set_internal_state":
            server.asked.append(request["server_args"])
            server.wanted = request["server_args"]
            self._answer(server.accepts)
        elif server.has_tokenizer:
            self._answer({"text": ["".join(f"<{token}>\n" for token in ids[:2]) for ids in request["tokens"]]})
        else:
            self._answer({"message": "no tokenizer"}, 400)


@pytest.fixture
def server():
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(["tree", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_text(server, capsys):
    status, out, err = run(capsys, "--url", server.url + "/")
    assert (status, err) == (0, "")
    assert out.startswith(f"{server.url}/: 39 nodes; tokens: 450 hot, 10 replay; 2 clusters at 8 bits; 3 namespaces")
    assert "1 of them salted" in out
    assert server.asked == [{"plt_tree": 2000, "plt_tree_tokens": 0}]
    assert "<100>" not in out


def test_html_is_written_and_text_only_when_asked(server, capsys, tmp_path):
    file = tmp_path / "tree.html"
    status, out, err = run(capsys, "--url", server.url, "--html", str(file))
    assert (status, out, err) == (0, "", f"tree: wrote {file}\n")
    assert file.read_text().startswith("<!doctype html>")
    status, out, _ = run(capsys, "--url", server.url, "--html", str(file), "--text")
    assert "bits" in out


def test_content_needs_the_flag(server, capsys):
    _, out, _ = run(capsys, "--url", server.url, "--tokens")
    assert server.asked == [{"plt_tree": 2000, "plt_tree_tokens": 48}]
    assert r"<100>\n<100>\n" in out
    assert "<3>" not in out  # salted
    server.has_tokenizer = False
    _, out, _ = run(capsys, "--url", server.url, "--tokens")
    assert "100 100 100" in out


def test_replicas_and_keys(server, capsys):
    server.accepts, server.key = [True, True], "k"
    status, out, _ = run(capsys, "--url", server.url, "--api-key", "k")
    assert status == 0
    assert "replica 0" in out
    assert "replica 1" in out


def test_another_reader_is_outlived(server, capsys):
    server.lost = 3
    assert run(capsys, "--url", server.url)[0] == 0
    assert len(server.asked) == 4


def refusal(capsys, *argv: str) -> str:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert err.startswith("sglang-plt: error: ")
    assert err.count("\n") == 1
    return err


def test_refusals(server, capsys, tmp_path):
    url = server.url
    assert "nothing answers at" in refusal(capsys, "--url", f"http://127.0.0.1:{free_port()}")
    assert "must begin with http://" in refusal(capsys, "--url", "localhost:30000")
    assert "is not a directory" in refusal(capsys, "--url", url, "--html", str(tmp_path / "no" / "file"))
    assert "1..100000" in refusal(capsys, "--url", url, "--max-rows", "0")
    server.backend = None
    assert "does not run this cache (its --radix-cache is not set)" in refusal(capsys, "--url", url)
    server.backend, server.accepts = "plt", [True, False]
    assert "another version of sglang-plt" in refusal(capsys, "--url", url)
    server.accepts, server.lost = [True], 99
    assert "something else reads" in refusal(capsys, "--url", url)
    server.key = "k"
    assert "give --api-key" in refusal(capsys, "--url", url)
    server.key = None
    for body in (b"<html>", b"[]", b"{}"):
        server.body = body
        assert "is not an SGLang server" in refusal(capsys, "--url", url)
