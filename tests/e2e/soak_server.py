"""A rollout server behind a proxy that a soak can have alter and delay its replies: `rollout.python` of a soak.

    soak_server.py CONTROL -P run_masked.py sglang.launch_server ... --host HOST --port PORT ...

Starts that server at another port, and answers at PORT. While the file CONTROL/SERVER.json is there it says what
becomes of replies to /generate: {"share": of them that are altered, "delay": seconds, "seed": int, "model": a folder
whose weights the server loads before it generates}. While the file CONTROL/closed is there, no server starts. Any other
command runs as it is: the transports ask the interpreter for its version of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
from aiohttp import web

from dynamo_megatron.runtime.process_signals import die_with_parent

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # python -P leaves out what lies beside a script
from alterations import CONTENT, alter

HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}  # headers of a connection
HUGE = 4 << 20  # bytes of a body that is too large
UP_EVERY = 0.2  # seconds between looks at the server


class Proxy:
    def __init__(self, upstream: str, control: Path):
        self._upstream, self._control = upstream, control
        self._said, self._rng = "", random.Random(0)

    async def answer(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        body, fault = await request.read(), self._fault() if request.path == "/generate" else {}
        await asyncio.sleep(fault.get("delay", 0.0))
        try:
            if "model" in fault:
                load = {"model_path": fault["model"]}
                async with session.post(
                    f"{self._upstream}/update_weights_from_disk", json=load, headers=headers
                ) as reply:
                    print(f"other weights: {reply.status} {(await reply.read())[:200]!r}", flush=True)
            async with session.request(
                request.method, self._upstream + request.path_qs, data=body, headers=headers, allow_redirects=False
            ) as reply:
                if fault.get("share") and reply.content_type == "application/json":
                    return await self._altered(request, reply, fault["share"])
                response = web.StreamResponse(status=reply.status)
                response.headers.update({k: v for k, v in reply.headers.items() if k.lower() not in HOP})
                await response.prepare(request)
                async for line in _lines(reply):
                    await response.write(self._event(line, fault.get("share", 0.0)))
                return response
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=f"{type(error).__name__}: {error}")

    def _fault(self) -> dict:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is being written
            said = self._control.read_text()
            if said != self._said:
                self._said, self._rng = said, random.Random(json.loads(said).get("seed", 0))
            return json.loads(said)
        return {}

    async def _altered(self, request: web.Request, reply: aiohttp.ClientResponse, share: float) -> web.StreamResponse:
        body = await reply.read()
        if self._rng.random() >= share:
            return web.Response(status=reply.status, body=body, content_type="application/json")
        alteration = alter(self._rng, body, huge=HUGE)
        print(f"altered: {alteration.what}", flush=True)
        await asyncio.sleep(alteration.delay)
        if request.transport is not None:
            request.transport.write(alteration.http())
            request.transport.close()
        return web.Response()

    def _event(self, line: bytes, share: float) -> bytes:
        """Of a stream: a finished response may have something wrong in it."""
        if not share or not line.startswith(b"data: {") or self._rng.random() >= share:
            return line
        alteration = alter(self._rng, line.removeprefix(b"data: ").rstrip(b"\n"), kinds=CONTENT)
        print(f"altered in a list: {alteration.what}", flush=True)
        return b"data: " + alteration.body + b"\n\n"


async def _lines(reply: aiohttp.ClientResponse):
    """The events of a stream, whole; what is none, as it comes."""
    if reply.content_type != "text/event-stream":
        async for chunk in reply.content.iter_any():
            yield chunk
        return
    read = b""
    async for chunk in reply.content.iter_any():
        *events, read = (read + chunk).split(b"\n\n")
        for event in events:
            yield event + b"\n\n"
    yield read


async def serve(host: str, port: int, proxy: Proxy, server: subprocess.Popen) -> int:
    """Until the server ends; its exit code."""
    app = web.Application(client_max_size=1 << 30)
    # A pool would take its connections in turns, and so keep all that a burst has opened until a long enough pause: the
    # server's sockets would say more of the pool than of the server.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def answer(request: web.Request) -> web.StreamResponse:
            return await proxy.answer(session, request)

        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        while server.poll() is None:
            await asyncio.sleep(UP_EVERY)
        await runner.cleanup()
    return server.returncode


def main(control: Path, words: list[str]) -> int:
    if "sglang.launch_server" not in words:
        return subprocess.run([sys.executable, *words]).returncode
    name = words[words.index("--served-model-name") + 1].rpartition("-")[0]
    host, place = words[words.index("--host") + 1], words.index("--port") + 1
    port = int(words[place])
    with socket.socket() as probe:
        probe.bind((host, 0))
        words[place] = str(probe.getsockname()[1])
    while (control / "closed").exists():
        time.sleep(UP_EVERY)
    on_death = functools.partial(die_with_parent, signal.SIGKILL, os.getpid())  # as the guard's child has it
    server = subprocess.Popen([sys.executable, *words], preexec_fn=on_death)
    proxy = Proxy(f"http://{host}:{words[place]}", control / f"{name}.json")
    return abs(asyncio.run(serve(host, port, proxy, server)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
