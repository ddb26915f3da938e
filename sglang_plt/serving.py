"""Runs ``sglang.launch_server`` as a child process, for the demo, the tests and the benchmarks; imports no SGLang."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from sglang_plt.client import Client, RequestError

__all__ = [
    "CALM_THREADS",
    "RequestError",
    "ServerProcess",
    "ServerStartError",
    "free_port",
    "group_members",
    "port_in_use",
]

LOG_TAIL_LINES = 30
STOP_GRACE_S = 15.0
"""Between SIGTERM and SIGKILL; SGLang looks for the signal every five seconds."""

CALM_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Environment for a server on shared CPU cores: threads that wait for one another sleep instead of spinning."""

_HANDLED = (signal.SIGTERM, signal.SIGHUP)
_ERROR_LINE = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b|.*: error: |.*\bnot found\b")


class ServerStartError(RuntimeError):
    """The server ended, or was not ready in time. ``summary`` is one line; ``str()`` adds the last lines of the log."""

    def __init__(self, summary: str, tail: Sequence[str] = ()):
        super().__init__("\n".join([summary, *(f"  | {line}" for line in tail)]))
        self.summary = summary
        self.tail = tuple(tail)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_in_use(port: int) -> bool:
    """Whether the loopback port cannot be had."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return True
    return False


def group_members(group: int) -> list[int]:
    """Ids of the processes of a process group; zombies, which hold nothing, are left out."""
    members = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (comm) state ppid pgrp ...", and comm may hold spaces and brackets
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                members.append(int(entry.parent.name))
    return members


class ServerProcess(Client):
    """One server on a loopback port for the length of a ``with`` block, and the client of it.

    The server and all its children are a process group of their own, which is gone when the block ends, however it
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
        self.port = free_port() if port is None else port
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.args = list(args)
        self.log_path = log_path or Path(tempfile.mkdtemp(prefix="sglang-plt-")) / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._env = dict(env or {})
        self._timeout_s = timeout_s
        self._progress = progress
        self._grace_s = 0.0  # nothing to lose before it is ready
        self._handlers: dict[int, Any] = {}

    # -- life cycle -----------------------------------------------------------------------------------------------

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Launch, and return when the server is ready; when that fails nothing is left running."""
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
            self._wait_until_ready(self.process)
        except BaseException:
            self.stop()
            raise
        self._grace_s = STOP_GRACE_S

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        started = reported = time.monotonic()
        while not self.answers("/ready"):
            now = time.monotonic()
            if process.poll() is not None:
                raise self._start_error(f"the server ended with status {process.returncode} before it was ready")
            if now - started > self._timeout_s:
                raise self._start_error(f"the server was not ready after {self._timeout_s:.0f} s")
            if now - reported >= 1:
                reported = now
                self._progress(now - started, (self.log_tail(1) or [""])[-1])
            time.sleep(0.2)

    def _start_error(self, what: str) -> ServerStartError:
        tail = self.log_tail(LOG_TAIL_LINES)
        reason = next((line.strip() for line in reversed(tail) if _ERROR_LINE.match(line)), "")
        return ServerStartError(f"{what}{': ' + reason[:300] if reason else ''} (log: {self.log_path})", tail)

    def stop(self) -> None:
        """End the server and its children: SIGTERM, then SIGKILL. Does nothing when there is none."""
        process = self.process
        try:
            if process is not None:
                # to the launcher alone: it ends its children in order, and takes their death by a signal for a crash
                process.terminate()
                self._wait_while(lambda: process.poll() is None, self._grace_s)
        finally:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                self._wait_while(lambda: process.poll() is None or bool(group_members(process.pid)), STOP_GRACE_S)
            self._restore_signals()

    @staticmethod
    def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
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

    # -- log ------------------------------------------------------------------------------------------------------

    def log_text(self) -> str:
        """All that the server has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int) -> list[str]:
        """The last lines of the log that are not blank."""
        return [line.rstrip() for line in self.log_text().splitlines() if line.strip()][-num_lines:]
