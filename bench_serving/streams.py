"""What a streaming server sends: SGLang's ``/generate`` and OpenAI's ``/v1/completions``, read into one answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class AnswerError(RuntimeError):
    """The server did not answer as it should; the message is one line."""


@dataclass
class Answer:
    """What has come so far.

    Attributes:
        ids: tokens.
        first: clock at the first token.
        last: clock at the last.
        gaps: seconds between tokens.
        cached: prompt tokens from a cache.
        details: the same by tier.
        finished: the server has said that this was all.
    """

    ids: list[int] = field(default_factory=list)
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cached: int = 0
    details: dict[str, int] | None = None
    finished: bool = False

    def add(self, new_ids: Sequence[int], now: float) -> None:
        """Tokens that came at ``now`` of the clock; a chunk of n counts as n equal gaps."""
        if not new_ids:
            return
        if self.first is None:
            self.first = now
            self.gaps += [0.0] * (len(new_ids) - 1)
        else:
            self.gaps += [(now - self.last) / len(new_ids)] * len(new_ids)
        self.last = now
        self.ids += new_ids


class Api(Protocol):
    """One way to ask for tokens."""

    path: str

    def payload(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Body of the request: greedy, exactly ``max_new_tokens`` tokens, streamed."""

    def read(self, event: dict[str, Any], answer: Answer, now: float) -> None:
        """Add one event to ``answer``. Raises AnswerError for an error of the server."""


class Generate:
    """SGLang's own."""

    path = "/generate"

    def payload(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        return {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}

    def read(self, event: dict[str, Any], answer: Answer, now: float) -> None:
        meta, ids = event["meta_info"], event["output_ids"]
        # all tokens so far, or with --incremental-streaming-output the new ones
        whole = len(ids) == meta.get("completion_tokens", len(ids))
        answer.add(ids[len(answer.ids) :] if whole else ids, now)
        answer.cached = meta.get("cached_tokens") or 0
        answer.details = _by_tier(meta.get("cached_tokens_details"))
        reason = meta.get("finish_reason")
        if reason is not None:
            answer.finished = True
            if reason.get("type") == "abort":
                raise AnswerError(f"aborted: {reason.get('message', 'no reason given')}")


class Completions:
    """OpenAI's, with ``return_token_ids`` as SGLang and vLLM have it.

    ``cached_tokens`` needs a server that reports them: ``--enable-cache-report`` on SGLang.
    """

    path = "/v1/completions"

    def __init__(self, model: str):
        self._model = model

    def payload(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_cached_tokens_details": True,
        }

    def read(self, event: dict[str, Any], answer: Answer, now: float) -> None:
        for choice in event.get("choices") or ():
            if choice.get("text") and choice.get("token_ids") is None:
                raise AnswerError("the answer has no token_ids: the server does not know return_token_ids")
            answer.add(choice.get("token_ids") or (), now)
            answer.finished = answer.finished or choice.get("finish_reason") is not None
            if choice.get("finish_reason") == "abort":
                raise AnswerError("aborted")
        details = (event.get("sglext") or {}).get("cached_tokens_details")
        if details is not None:
            answer.details = _by_tier(details)
            answer.cached = sum((answer.details or {}).values())
        reported = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
        if reported is not None:
            answer.cached = reported


def _by_tier(details: Any) -> dict[str, int] | None:
    """Counts alone: SGLang also names its storage backend there."""
    if not details:
        return None
    return {tier: count for tier, count in details.items() if isinstance(count, int)}


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events, parsed, from the raw bytes of an answer.

    Raises:
        AnswerError: an event is an error or no JSON object.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise AnswerError(f"an event is not JSON: {data[:80]!r}") from None
            if not isinstance(event, dict):
                raise AnswerError(f"an event is no JSON object: {data[:80]!r}")
            if "error" in event:
                raise AnswerError(" ".join(json.dumps(event["error"]).split())[:300])
            yield event
