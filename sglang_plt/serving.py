"""Runs ``sglang.launch_server`` as a child process, for the demo, the tests and the benchmarks; imports no SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

LOG_TAIL_LINES = 30
STOP_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL; SGLang drains for at most as long."""

_HANDLED = (signal.SIGTERM, signal.SIGHUP)
_ERROR_LINE = re.compile(r"(?:^|\s)(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*|.*: error: .*|.*\bnot found\b.*")
_SAMPLE = re.compile(r"^sglang:plt_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

# loopback only: a proxy of the environment must not see these requests
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class ServerStartError(RuntimeError):
    """The server ended, or was not ready in time. ``summary`` is one line; ``str()`` adds the last lines of the log."""

    def __init__(self, summary: str, log_path: Path | None = None, tail: Sequence[str] = ()):
        super().__init__("\n".join([summary, *(f"  | {line}" for line in tail)]))
        self.summary = summary
        self.log_path = log_path
        self.tail = tuple(tail)


class RequestError(RuntimeError):
    """The server answered with a status other than 200; ``body`` is what it said."""

    def __init__(self, what: str, status: int, body: str):
        super().__init__(f"{what}: status {status}: {body[:500]}")
        self.status = status
        self.body = body


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_in_use(port: int) -> bool:
    """Whether something listens on, or holds, the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class ServerProcess:
    """One server on a loopback port for the length of a ``with`` block.

    The server and all its children are in a process group of their own, which is gone when the block ends, however it
    ends: by an exception, Ctrl-C, or SIGTERM or SIGHUP (handled while a server started in the main thread runs, then
    delivered again). Only SIGKILL of this process leaves it behind.

    Args:
        args: arguments of ``sglang.launch_server`` without ``--host`` and ``--port``.
        port: None takes a free one.
        log_path: receives stdout and stderr; None makes a file in a new temporary directory.
        env: added to the environment of this process.
        timeout_s: until the server must be ready.
        progress: called about once a second while it starts, with the seconds so far and the last line of the log.

    Raises:
        ServerStartError: from ``with`` and :meth:`start`.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        port: int | None = None,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        progress: Callable[[float, str], None] = lambda seconds, line: None,
    ):
        self.args = list(args)
        self.port = free_port() if port is None else port
        self.log_path = log_path or Path(tempfile.mkdtemp(prefix="sglang-plt-")) / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = dict(env or {})
        self._timeout_s = timeout_s
        self._progress = progress
        self._handlers: dict[int, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- life cycle -----------------------------------------------------------------------------------------------

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Launch, and return when the server is ready; otherwise nothing is left running."""
        if self.process is not None:
            raise RuntimeError("a ServerProcess starts once; make another one")
        if port_in_use(self.port):
            raise ServerStartError(f"port {self.port} is in use: stop what holds it, or choose another port")
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._handle_signals()
        try:
            with self.log_path.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, *self.args],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env},
                    start_new_session=True,
                )
            self._wait_until_ready(time.monotonic())
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, started: float) -> None:
        assert self.process is not None
        reported = 0.0
        while True:
            seconds = time.monotonic() - started
            if self.process.poll() is not None:
                raise self._start_error(f"the server ended with status {self.process.returncode} before it was ready")
            if self._answers("/ready"):
                return
            if seconds > self._timeout_s:
                raise self._start_error(f"the server was not ready after {self._timeout_s:.0f} s")
            if seconds - reported >= 1:
                reported = seconds
                self._progress(seconds, (self.log_tail(1) or [""])[-1])
            time.sleep(0.2)

    def _answers(self, path: str) -> bool:
        try:
            with _open(self.url + path, timeout=5):
                return True
        except OSError:  # refused, 503 while it starts, or slow
            return False

    def _start_error(self, what: str) -> ServerStartError:
        tail = self.log_tail(LOG_TAIL_LINES)
        reason = next((line.strip() for line in reversed(tail) if _ERROR_LINE.match(line)), "")
        summary = f"{what}{': ' + reason[:300] if reason else ''} (log: {self.log_path})"
        return ServerStartError(summary, self.log_path, tail)

    def stop(self) -> None:
        """End the server and its children: SIGTERM, then SIGKILL. Does nothing when there is none."""
        try:
            if self.process is not None:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.process.pid, number)
                    if self._wait_for_group(STOP_GRACE_S):
                        break
        finally:
            self._restore_signals()

    def _wait_for_group(self, seconds: float) -> bool:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while True:
            self.process.poll()
            if not group_members(self.process.pid):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._handlers.get(number, signal.SIG_DFL)
        self.stop()
        signal.signal(number, previous)
        signal.raise_signal(number)

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, previous)

    # -- log and requests -----------------------------------------------------------------------------------------

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines of the log that are not blank."""
        return [line.rstrip() for line in self.log_text().splitlines() if line.strip()][-num_lines:]

    def get_json(self, path: str, timeout_s: float = 60.0) -> Any:
        """The JSON answer to a GET. Raises RequestError, or OSError when nothing answers."""
        return json.loads(self._request(path, None, timeout_s))

    def post_json(self, path: str, payload: Any, timeout_s: float = 300.0) -> Any:
        """The JSON answer to a POST of ``payload`` as JSON. Raises as :meth:`get_json`."""
        return json.loads(self._request(path, payload, timeout_s))

    def stream_json(self, path: str, payload: Any, timeout_s: float = 300.0) -> Iterator[Any]:
        """The server-sent events of a POST, parsed, as they come. Raises as :meth:`get_json`."""
        with self._response(path, payload, timeout_s) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data != b"[DONE]":
                    yield json.loads(data)

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Empty the cache once no request runs; waits that long for them. Raises RequestError when it cannot."""
        self._request(f"/flush_cache?timeout={wait_s}", {}, wait_s + 30)

    def metrics(self, rank: int = 0) -> dict[str, float]:
        """``sglang:plt_*`` of one rank (needs ``--enable-metrics``), without that prefix and without histogram buckets.

        >>> parse_metrics('sglang:plt_tokens{tier="cold",tp_rank="0"} 7.0', rank=0)
        {'tokens_cold': 7.0}
        """
        return parse_metrics(self._request("/metrics", None, 60).decode(), rank)

    def _request(self, path: str, payload: Any, timeout_s: float) -> bytes:
        with self._response(path, payload, timeout_s) as response:
            return response.read()

    def _response(self, path: str, payload: Any, timeout_s: float) -> Any:
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            return _open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RequestError(f"{request.get_method()} {path}", error.code, text) from None


def parse_metrics(text: str, rank: int) -> dict[str, float]:
    """Name (values of labels but ``tp_rank`` appended with ``_``) -> value; see :meth:`ServerProcess.metrics`."""
    values = {}
    for name, labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        if found.pop("tp_rank", str(rank)) == str(rank) and not name.endswith(("_bucket", "_created")):
            values["_".join([name, *found.values()])] = float(value)
    return values


def group_members(group: int) -> list[int]:
    """Ids of the running processes of a process group; zombies, which hold nothing, are left out."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (comm) state ppid pgrp ...", and comm may hold spaces and brackets
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                members.append(int(entry.parent.name))
    return members
