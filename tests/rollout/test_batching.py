"""Requests that share an HTTP request: each is answered when it is finished, and fails alone."""

import asyncio

from stand_ins import Server, listening

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.batching import LARGEST
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.endpoint import Endpoint


def run(server: Server, work, **options):
    async def with_client():
        async with listening(server) as url, open_session() as session:
            async with asyncio.timeout(20):
                return await work(SGLangClient(session, Endpoint("s", 1, url, 1, ""), RolloutConfig(**options), []))

    return asyncio.run(with_client())


def test_requests_of_one_moment_share_http_requests():
    async def work(client):
        first = await asyncio.gather(*(client.generate(f"r{i}", [1]) for i in range(LARGEST + 2)))
        return [*first, await client.generate("later", [1])]

    server = Server(lists=True)
    responses = run(server, work)
    names = [f"r{i}" for i in range(LARGEST + 2)]
    assert server.asked == [names[:LARGEST], names[LARGEST:], "later"]
    assert all(r.error == "" and r.tokens == [7] * 3 for r in responses)


def test_a_response_does_not_wait_for_the_others_of_its_list():
    async def work(client):
        asked = {name: asyncio.create_task(client.generate(name, [1])) for name in ("slow", "a", "b")}
        done, pending = await asyncio.wait(asked.values(), timeout=10, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 2:
            done, pending = await asyncio.wait(asked.values(), timeout=0.01)
        assert pending == {asked["slow"]}
        finish.set()
        return await asked["slow"]

    finish = asyncio.Event()

    async def behaviour(rid, number):
        if rid == "slow":
            await finish.wait()

    assert run(Server(behaviour, lists=True), work).error == ""


def test_one_that_takes_too_long_is_aborted_alone():
    async def behaviour(rid, number):
        if rid == "slow":
            await asyncio.sleep(60)

    async def work(client):
        return await asyncio.gather(*(client.generate(name, [1]) for name in ("slow", "a", "b")))

    server = Server(behaviour, lists=True)
    slow, *others = run(server, work, timeout=0.5)
    assert slow.error == "no response to slow within rollout.timeout (0.5 s)" and server.aborted == ["slow"]
    assert all(r.error == "" for r in others)


def test_what_a_broken_connection_leaves_is_asked_alone_and_no_other():
    async def behaviour(rid, number):
        if rid == "breaks":
            await asyncio.sleep(0.2)
            raise ConnectionResetError

    async def work(client):
        return await asyncio.gather(*(client.generate(name, [1]) for name in ("a", "breaks", "b")))

    async def once(rid, number):
        return await behaviour(rid, number)

    server = Server(once, lists=True)
    assert all(r.error == "" for r in run(server, work))
    assert server.asked == [["a", "breaks", "b"], "breaks-alone"]


def test_a_server_without_lists_gets_single_requests_from_then_on():
    async def work(client):
        await asyncio.gather(*(client.generate(name, [1]) for name in ("a", "b")))
        await asyncio.gather(*(client.generate(name, [1]) for name in ("c", "d")))

    server = Server()
    run(server, work)
    assert sorted(server.asked) == ["a", "b", "c", "d"]
