"""A process that was held up concludes nothing from what it did not hear meanwhile."""

import asyncio
import threading
import time

from aiohttp import web
from stand_ins import VOCABULARY, Server, external, fleet_of, listening

from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.servers import fleet, silence
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.servers.silence import Silence


def test_a_late_look_begins_anew(monkeypatch):
    monkeypatch.setattr(silence, "LATE", 0.2)
    watched = Silence()
    for _ in range(6):
        time.sleep(0.05)
        seconds = watched.look()
    assert seconds >= 0.3
    time.sleep(0.3)
    assert watched.look() == 0.0
    time.sleep(0.1)
    watched.heard()
    assert watched.look() < 0.1


class Elsewhere:
    """A server in a thread of its own, as use `with`: what holds this one's event loop does not hold it."""

    def __init__(self, server: Server):
        self._server, self._up = server, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        async with listening(self._server) as self.url:
            self._up.set()
            await self._end.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._up.wait(10)
        return self.url

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)


class SlowlyHealthy(Server):
    async def health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return await super().health(request)


def test_servers_are_not_condemned_for_what_held_this_process(monkeypatch):
    monkeypatch.setattr(silence, "LATE", 0.6)
    monkeypatch.setattr(fleet, "HEALTH_EVERY", 0.1)

    async def work(url):
        config = external([url], health_timeout=1.0)
        async with open_session() as session:
            servers = Fleet(config, session, [], VOCABULARY)
            running = asyncio.create_task(servers.run())
            await servers.wait_started()
            async with servers.watched():
                for wait in (0.15, 0.3, 0.2):  # in the midst of a question, and of none
                    await asyncio.sleep(wait)
                    time.sleep(1.5)
                await asyncio.sleep(0.7)
                assert set(servers.serving()) == {"server-0"} and servers.notes == []
                server.healthy = False
                async with asyncio.timeout(10):
                    while servers.serving():
                        await asyncio.sleep(0.05)
            assert servers.notes == [
                "server-0 left the rotation: no answer to /health for rollout.health_timeout (1 s)"
            ]
            running.cancel()
            await asyncio.wait([running])

    server = SlowlyHealthy()
    with Elsewhere(server) as url:
        asyncio.run(work(url))


def test_a_server_that_does_not_tell_its_load_stays(monkeypatch):
    monkeypatch.setattr(fleet, "HEALTH_EVERY", 0.3)

    class Unspoken(Server):
        async def load(self, request: web.Request) -> web.Response:
            await asyncio.sleep(60)

    async def work():
        async with fleet_of(Unspoken(), health_timeout=6.0) as servers, servers.watched():
            await asyncio.sleep(9)
            assert set(servers.serving()) == {"server-0"} and servers.notes == []

    asyncio.run(work())
