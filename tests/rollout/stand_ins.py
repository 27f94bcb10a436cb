"""Servers that can be made to misbehave, unlike SGLang's own (those: tests/e2e/test_faults.py)."""

import asyncio
import contextlib
import json
from collections.abc import Sequence

from aiohttp import web

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.types import Rollout

VOCABULARY = 128  # rows of the embedding of tools/tiny_model.py
ABORTED = {"type": "abort", "message": "aborted by its id"}


def rollout(name: str, response: Sequence[int] = (3, 4), **fields) -> Rollout:
    """A rollout of the prompt "é" with the tokens 1, 2, which the weights of the step before have sampled."""
    step, n = int(name[:6]), len(response)
    made = {"rollout_id": name, "group_id": name.rpartition("-")[0], "prompt_id": "é", "step": step}
    made |= {"tokens": [1, 2, *response], "response_mask": [0, 0, *[1] * n], "engine_logprobs": [-0.5] * n}
    made |= {"weight_versions": [(step - 1, 0, n)], "finish_reason": "stop", "reward": 1.0, "success": True}
    return Rollout(**({"reward_parts": {"math": 1.0}} | made | fields))


async def generated(generator, step: int, prompts, counts, first: int = 0):
    """The result of a step, or of a part of it, as the trainer asks a Generator for it."""
    await generator.dispatch(step, prompts, counts, first)
    return await generator.collect(step, first)


def sampled(rollout, step: int, prompts, counts, on_poll=None, on_count=None, first: int = 0):
    """The same of a RolloutWorker, or of RecordedRollouts."""
    rollout.dispatch(step, prompts, counts, on_poll, first)
    return rollout.collect(step, on_poll, on_count, first)


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def name_of(rid: str) -> str:
    return rid.removesuffix(";")


def reply(rid: str, tokens: int = 3, finish: dict | None = None) -> dict:
    return {
        "meta_info": {
            "id": rid,
            "finish_reason": finish or {"type": "stop", "matched": None},
            "completion_tokens": tokens,
            "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
            "output_token_logprobs": [[-1.0, 7, None]] * tokens,
        }
    }


def event(content) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class Recorder:
    """A Listener that writes down what it hears of servers."""

    def __init__(self):
        self.heard = []

    def up(self, endpoint):
        self.heard.append(("up", endpoint.name, endpoint.incarnation))

    def down(self, name, why, final):
        self.heard.append(("down", name, why, final))


class Server:
    """`behaviour(request's name, number of the request)`: a reply, a response, or None for the usual one.

    It refuses lists of requests unless `lists`; for those a behaviour only waits, or raises what breaks the connection.
    `lists(request, request ids)` may instead be what answers a list. A request's name is its id without the last sign.
    """

    def __init__(self, behaviour=None, healthy: bool = True, lists=False):
        self.behaviour, self.healthy, self.lists = behaviour, healthy, lists
        self.asked: list[str] = []  # names, or lists of names
        self.running: list[tuple[str, asyncio.Future]] = []  # request id, done when it is aborted
        self.sampling: dict[str, dict] = {}  # request id -> its sampling parameters
        self.aborted: list[str] = []
        self.under_way = self.most = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        rid, sampling = payload["rid"], payload["sampling_params"]
        several = isinstance(rid, list)
        if several and not self.lists:
            return web.json_response({"error": {"message": "no lists"}}, status=400)
        for r, parameters in zip(rid if several else [rid], sampling if several else [sampling], strict=True):
            self.sampling[name_of(r)] = parameters
        self.asked.append([name_of(r) for r in rid] if several else name_of(rid))
        if several:
            return await (self.lists(request, rid) if callable(self.lists) else self._stream(request, rid))
        number = len(self.asked)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0.01)
            made = self.behaviour(name_of(rid), number) if self.behaviour else None
            if asyncio.iscoroutine(made):
                made = await self._unless_aborted(rid, made)
            if made is ABORTED:
                made = web.json_response(reply(rid, 1, ABORTED))
            return made if made is not None else web.json_response(reply(rid))
        finally:
            self.under_way -= 1

    async def _stream(self, request: web.Request, rids: list[str]) -> web.StreamResponse:
        stream = await open_stream(request)

        async def answer(rid: str) -> None:
            begun = reply(rid)
            begun["meta_info"]["finish_reason"] = None
            await stream.write(event(begun))
            made = None
            if self.behaviour:
                made = await self._unless_aborted(rid, self.behaviour(name_of(rid), len(self.asked)))
            await stream.write(event(reply(rid, 1, ABORTED) if made is ABORTED else reply(rid)))

        await asyncio.gather(*map(answer, rids))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _unless_aborted(self, rid: str, work):
        """What `work` returns, ABORTED once the request is aborted."""
        task, aborted = asyncio.ensure_future(work), asyncio.get_running_loop().create_future()
        self.running.append((rid, aborted))
        try:
            await asyncio.wait({task, aborted}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else ABORTED
        finally:
            task.cancel()
            self.running.remove((rid, aborted))

    async def abort(self, request: web.Request) -> web.Response:
        """As SGLang, ends every request whose id begins with the given one."""
        asked = (await request.json()).get("rid", "")
        self.aborted.append(name_of(asked) or "all")
        for rid, aborted in self.running:
            if rid.startswith(asked) and not aborted.done():
                aborted.set_result(None)
        return web.json_response({})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def answer(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def load(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": []})


async def open_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    return stream


@contextlib.asynccontextmanager
async def listening(server: Server, port: int = 0):
    """Its URL."""
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/loads", server.load)
    app.router.add_post("/flush_cache", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def external(urls: list[str], output="none", **rollout) -> Config:
    """With limits that a busy machine keeps."""
    return Config(
        model={"path": "none"},
        data={"source": "none"},
        algorithm={"rollout_correction": {}} if "max_staleness" in rollout else {},
        output_dir=str(output),
        rollout={"placement": "external", "urls": urls, "start_timeout": 60, "health_timeout": 20.0, **rollout},
    )


@contextlib.asynccontextmanager
async def fleet_of(*servers: Server, **rollout):
    """A fleet of them, as somebody else's servers."""
    async with contextlib.AsyncExitStack() as stack:
        config = external([await stack.enter_async_context(listening(server)) for server in servers], **rollout)
        session = await stack.enter_async_context(open_session())
        fleet = Fleet(config, session, [], VOCABULARY)
        running = asyncio.create_task(fleet.run())
        try:
            await fleet.wait_started()
            yield fleet
        finally:
            running.cancel()
            await asyncio.wait([running])
