"""A service on loopback whose answers a test makes up: a URL's, chat completions, and SGLang's /classify."""

import asyncio
import json
import threading

from aiohttp import web

from dynamo_megatron.types import Prompt

PROMPT = Prompt("p7", text="1 + 1?", answer="2")


def completion(text, **choice):
    return {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": {"content": text}, **choice}]}


def lengths(request, _number=0):
    """The length of each response as its reward."""
    return {"rewards": [len(sample["response"]) for sample in request["samples"]]}


def scored(reward_pool, *responses, prompt=PROMPT):
    """Each response's score, or the error it raised."""

    async def gather():
        return await asyncio.gather(*(reward_pool.score(prompt, r) for r in responses), return_exceptions=True)

    return asyncio.run(gather())


class Endpoint:
    """`answer(request's JSON, n)` gives the n-th request (from 1) a body (JSON or bytes), (status, body) or (status,
    body, headers), or awaits one; None drops the connection. `url` is the base of its OpenAI API, `score` that of a
    service of the user's."""

    def __init__(self, answer=lengths):
        self.answer = answer
        self.requests, self.keys = [], []
        self.under_way = self.most_under_way = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(60)

    async def _serve(self):
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        for path in ("/v1/chat/completions", "/v1/classify", "/score"):
            app.router.add_post(path, self._asked)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.url, self.score = f"{base}/v1", f"{base}/score"
        self._ready.set()
        await self._done.wait()
        await runner.cleanup()

    async def _asked(self, request):
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
