"""A client of one SGLang server on this machine, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SAMPLE = re.compile(r"^sglang:plt_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

# loopback only: a proxy of the environment must not see these requests
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class RequestError(RuntimeError):
    """The server answered with an error; ``body`` is what it said."""

    def __init__(self, what: str, status: int, body: str):
        super().__init__(f"{what}: status {status}: {' '.join(body.split())[:300]}")
        self.status = status
        self.body = body


class Client:
    """Requests to the server at ``url``, with ``api_key`` where it asks for one.

    All raise RequestError, or OSError when nothing answers.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def answers(self, path: str) -> bool:
        """Whether a GET has status 200 within five seconds; raises nothing."""
        try:
            with _open(self.url + path, timeout=5):
                return True
        except OSError:
            return False

    def get_json(self, path: str, timeout_s: float = 60.0) -> Any:
        """The JSON answer to a GET."""
        return json.loads(self._request(path, None, timeout_s))

    def post_json(self, path: str, payload: Any, timeout_s: float = 300.0) -> Any:
        """The JSON answer to a POST of ``payload`` as JSON."""
        return json.loads(self._request(path, payload, timeout_s))

    def stream_json(self, path: str, payload: Any, timeout_s: float = 300.0) -> Iterator[Any]:
        """The server-sent events of a POST, parsed, as they come."""
        with self._response(path, payload, timeout_s) as response:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if line.startswith(b"data: ") and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise RequestError(f"POST {path}", response.status, json.dumps(event["error"]))
                    yield event

    def flush_cache(self, wait_s: float = 30.0) -> None:
        """Empty the cache once no request runs; waits that long for them."""
        self._request(f"/flush_cache?timeout={wait_s}", {}, wait_s + 30)

    def metrics(self, rank: int = 0) -> dict[str, float]:
        """``sglang:plt_*`` of one rank; see :func:`parse_metrics`. The server needs ``--enable-metrics``."""
        return parse_metrics(self._request("/metrics", None, 60).decode(), rank)

    def _request(self, path: str, payload: Any, timeout_s: float) -> bytes:
        with self._response(path, payload, timeout_s) as response:
            return response.read()

    @contextmanager
    def _response(self, path: str, payload: Any, timeout_s: float) -> Iterator[Any]:
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, body, self._headers)
        try:
            with _open(request, timeout=timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RequestError(f"{request.get_method()} {path}", error.code, text) from None
        except http.client.HTTPException as error:
            raise ConnectionError(f"{request.get_method()} {path}: the answer broke off: {error!r}") from error


def parse_metrics(text: str, rank: int) -> dict[str, float]:
    """The samples ``sglang:plt_*`` of one rank, without prefix and histogram buckets; labels are appended to the name.

    >>> parse_metrics('sglang:plt_tokens{tier="cold",tp_rank="0"} 7.0', rank=0)
    {'tokens_cold': 7.0}
    """
    values = {}
    for name, labels, value in _SAMPLE.findall(text):
        found = dict(_LABEL.findall(labels))
        if found.pop("tp_rank", str(rank)) == str(rank) and not name.endswith(("_bucket", "_created")):
            values["_".join([name, *found.values()])] = float(value)
    return values
