"""Restarts: when, and after what. The servers do not start, or are stand-ins that end."""

import asyncio

from stand_ins import VOCABULARY, Recorder, Server, external, listening, until

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers import supervisor
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.rollout.servers.supervisor import Supervisor


class Ending:
    """Comes up and ends."""

    def __init__(self, config, model, log, *, name, incarnation, slot, slots, cached_tokens):
        self.endpoint = Endpoint(name, incarnation, "http://127.0.0.1:1", 1, "")
        assert cached_tokens == (None if incarnation == 1 else 7)
        self.cached_tokens = 7

    def start(self):
        pass

    async def wait_ready(self):
        pass

    def check(self):
        raise RolloutError("out of memory")

    def stop(self, grace=0.0):
        pass


def run_until(servers, reached):
    async def work():
        running = asyncio.create_task(servers.run())
        await until(reached)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(work())


def test_a_server_that_comes_up_and_ends_is_never_given_up(tmp_path, monkeypatch):
    heard = Recorder()
    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    monkeypatch.setattr(supervisor, "SGLangServer", Ending)
    servers = Supervisor(external(["http://unused"], output=tmp_path), ["server-0"], heard)
    run_until(servers, lambda: len(heard.heard) >= 14)
    assert heard.heard[:14:2] == [("up", "server-0", n) for n in range(1, 8)]
    assert heard.heard[1:14:2] == [("down", "server-0", "out of memory", False)] * 7


def test_where_memory_is_shared_a_server_starts_again_in_a_weight_sync_alone(tmp_path, monkeypatch):
    """Of two servers one never comes up; it is waited for once."""
    started, dead = [], set()

    async def work():
        async with listening(Server()) as url, open_session() as session:

            class Sharing(Ending):
                def __init__(self, *_, name, incarnation, **__):
                    self.endpoint = Endpoint(name, incarnation, url, 1, "")
                    self.cached_tokens = None

                def start(self):
                    if self.endpoint.name == "server-0":
                        started.append((self.endpoint.incarnation, fleet.syncing))

                async def wait_ready(self):
                    if self.endpoint.name == "server-1":
                        await asyncio.Event().wait()

                async def release_caches(self):
                    pass

                def check(self):
                    if self.endpoint.incarnation in dead:
                        raise RolloutError("killed")

            monkeypatch.setattr(supervisor, "SGLangServer", Sharing)
            needed = {"model": {"path": "none"}, "data": {"source": "none"}, "output_dir": str(tmp_path)}
            rollout = {"offload": True, "servers": 2}
            fleet = Fleet(Config(**needed, rollout=rollout), session, [], VOCABULARY)
            running = asyncio.create_task(fleet.run())
            await until(fleet.serving)
            fleet.config = Config(**needed, rollout={**rollout, "start_timeout": 1e-3})
            await fleet.wait_started()
            assert [note.split()[0] for note in fleet.notes] == ["server-1"]
            fleet.notes.clear()
            fleet.config = Config(**needed, rollout={**rollout, "start_timeout": 3600})
            async with asyncio.timeout(60):
                for incarnation in (1, 2):
                    dead.add(incarnation)
                    while len(fleet.notes) < incarnation:  # one for each server that is lost
                        await asyncio.sleep(0.01)
                    (endpoint,) = await fleet.begin_sync(incarnation)
                    assert endpoint.incarnation == incarnation + 1
                    await fleet.end_sync(incarnation, {endpoint: None})
            running.cancel()
            await asyncio.wait([running])
        assert started == [(1, False), (2, True), (3, True)]

    monkeypatch.setattr(supervisor, "PAUSE", 0.0)
    monkeypatch.setattr(supervisor, "POLL_EVERY", 0.01)
    asyncio.run(work())
