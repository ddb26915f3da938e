"""A server that streams, errs, hangs and hangs up, as the first token of a prompt says."""

import asyncio
import json
import time

from aiohttp import web

STATUS, HANG, HANG_UP, ERROR, UNFINISHED, NOT_JSON, ABORT, SLOW = range(1, 9)
"""First token of a prompt: what the server does with it. Above is an answer."""
GAP_S = 0.02


class Fake:
    """Answers ``[len(prompt), len(prompt) + 1, ...]``; counts what it was asked."""

    def __init__(self):
        self.asked = []
        self.at_once = self.most_at_once = 0

    async def generate(self, request):
        body = await request.json()
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        assert body["sampling_params"]["ignore_eos"]
        return await self._answer(request, prompt, count, self._generate_event)

    async def incremental(self, request):
        body = await request.json()
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]

        def event(ids, done, prompt):
            return {**self._generate_event(ids, done, prompt), "output_ids": ids[-1:]}

        return await self._answer(request, prompt, count, event)

    async def completions(self, request):
        body = await request.json()
        assert body["model"] == "m"
        response = await self._answer(request, body["prompt"], body["max_tokens"], self._completions_event, end=False)
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 4}}
        for event in ({"choices": [], "sglext": {"cached_tokens_details": {"device": 1, "host": 3}}}, {"usage": usage}):
            await self._send(response, event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request):
        return web.json_response({"data": [{"id": "m"}]})

    @staticmethod
    def _generate_event(ids, done, prompt):
        details = {"device": 1, "host": 2, "storage_backend": "none"}
        meta = {"completion_tokens": len(ids), "cached_tokens": 3, "cached_tokens_details": details}
        reason = {"type": "abort", "message": "too long"} if prompt[0] == ABORT else {"type": "length"}
        return {"output_ids": ids, "meta_info": {**meta, "finish_reason": reason if done else None}}

    @staticmethod
    def _completions_event(ids, done, prompt):
        token_ids = None if prompt[0] == UNFINISHED else ids[-1:]
        return {"choices": [{"text": "x", "token_ids": token_ids, "finish_reason": "length" if done else None}]}

    @staticmethod
    async def _send(response, event):
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        await response.write(data[:9])  # an event in two pieces
        await response.write(data[9:])

    async def _answer(self, request, prompt, count, event, end=True):
        self.asked.append((time.perf_counter(), prompt))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._stream(request, prompt, count, event, end)
        finally:
            self.at_once -= 1

    async def _stream(self, request, prompt, count, event, end):
        if prompt[0] == STATUS:
            return web.Response(status=500, text="out of\nmemory")
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(count):
            await asyncio.sleep(GAP_S * (5 if prompt[0] == SLOW else 1))
            if index == 1 and prompt[0] == HANG:
                await asyncio.sleep(30)
            if index == 1 and prompt[0] == HANG_UP:
                request.transport.abort()
                return response
            if index == 1 and prompt[0] == ERROR:
                await self._send(response, {"error": {"message": "no room"}})
                return response
            if index == 1 and prompt[0] == NOT_JSON:
                await response.write(b"data: {oops\n\n")
                return response
            ids = [len(prompt) + i for i in range(index + 1)]
            done = index == count - 1 and not (prompt[0] == UNFINISHED and end)
            await self._send(response, event(ids, done, prompt))
        if end:
            await response.write(b"data: [DONE]\n\n")
        return response
