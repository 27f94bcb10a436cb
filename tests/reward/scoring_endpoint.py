"""An endpoint on loopback whose answers a test makes up: chat completions, and SGLang's /classify."""

import asyncio
import functools
import json
import threading
import time

import reward_service
from aiohttp import web

from dynamo_megatron.types import Prompt

PROMPT = Prompt("p7", text="1 + 1?", answer="2")


scored = functools.partial(reward_service.scored, prompt=PROMPT)


def completion(text):
    return {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": text}}]}


def classes(*scores):
    return [{"embedding": [score], "meta_info": {"id": str(i)}} for i, score in enumerate(scores)]


class Listening:
    """`_serve` listens in a thread of its own while this is used as `with`: it sets `_loop` and `_ready`, and ends with
    `_done`."""

    def __init__(self):
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(60)


class Endpoint(Listening):
    """`answer(request's JSON, n)` gives the n-th request (from 1) a body (JSON or bytes), (status, body) or (status,
    body, headers), or awaits one; None drops the connection. `url` is its base, `begun` the monotonic seconds of every
    request."""

    def __init__(self, answer):
        self.answer = answer
        self.requests, self.keys, self.begun = [], [], []
        self.under_way = self.most_under_way = 0
        super().__init__()

    async def _serve(self):
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._asked)
        app.router.add_post("/v1/classify", self._asked)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        await self._done.wait()
        await runner.cleanup()

    async def _asked(self, request):
        self.begun.append(time.monotonic())
        self.keys.append(request.headers.get("Authorization"))
        self.requests.append(await request.json())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            answer = self.answer(self.requests[-1], len(self.requests))
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self.under_way -= 1
        if answer is None:
            request.transport.abort()
            return web.Response()
        status, body, headers = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(status=status, body=encoded, headers=headers)
