"""The server that the client is tested against."""

import asyncio
import threading

import pytest
from aiohttp import web

from tests.bench_serving.fake_server import Fake


@pytest.fixture
def fake():
    """A fake server on a thread of its own; ``fake.url`` is where."""
    fake, loop = Fake(), asyncio.new_event_loop()

    async def start():
        app = web.Application()
        app.router.add_post("/generate", fake.generate)
        app.router.add_post("/incremental", fake.incremental)
        app.router.add_post("/v1/completions", fake.completions)
        app.router.add_get("/v1/models", fake.models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
