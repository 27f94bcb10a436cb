"""What becomes of requests when servers misbehave."""

import asyncio
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from stand_ins import Server, fleet_of, reply

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import Request
from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.rollout.sampling import Sampling
from dynamo_megatron.rollout.servers.fleet import NoServer


def sample(*servers: Server, requests: int = 40, pushed: bool = False, late: str = "", **rollout):
    """(outcomes by request: (response, server), the fleet) of `requests` in groups of four. `late`: the request
    whose time is over."""

    async def work():
        outcomes = {}

        async def take(request, response, server):
            assert request.name not in outcomes, "a second outcome"
            outcomes[request.name] = response, server

        async with fleet_of(*servers, **rollout) as fleet:
            if pushed:
                endpoints = await fleet.begin_sync(0)
                await fleet.end_sync(0, dict.fromkeys(endpoints))
            names = [(f"r{i}", i // 4) for i in range(requests)]
            asked = [Request(r, f"g{i}", f"p{i}", [1, 2], limit=1.0 if r == late else None) for r, i in names]
            await Sampling(fleet, asked, take).run()
            assert len(outcomes) == requests and not any(m.requests for m in fleet.serving().values())
            return outcomes, fleet

    return asyncio.run(work())


def served_by(outcomes) -> set[str]:
    return {server for _, server in outcomes.values()}


def test_groups_stay_together_and_no_server_has_more_than_its_share():
    a, b = Server(), Server()
    outcomes, _ = sample(a, b, concurrency=3)
    assert max(a.most, b.most) == 3 and served_by(outcomes) == {"server-0", "server-1"}
    outcomes, *_ = sample(Server(), Server())
    by_group = {g: {outcomes[f"r{4 * g + k}"][1] for k in range(4)} for g in range(10)}
    assert all(len(servers) == 1 for servers in by_group.values())


def unavailable(rid, number):
    return web.json_response({}, status=503)


class Closing(Server):
    """Closes the connections of its first `count` requests."""

    def __init__(self, count: int):
        super().__init__()
        self.left = count

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.left:
            self.left -= 1
            request.transport.close()
        return await super().generate(request)


def test_broken_connections_are_no_fault_of_a_healthy_server():
    outcomes, fleet = sample(Closing(40))
    assert not any(r.error for r, _ in outcomes.values()) and fleet.uses["server-0"].retries > 0
    assert fleet.notes == [] and set(fleet.serving()) == {"server-0"}


@pytest.mark.parametrize("server", [lambda: Server(unavailable), lambda: Closing(1_000_000)])
def test_a_server_that_serves_nobody_costs_no_rollout_and_is_restarted(server):
    outcomes, fleet = sample(server(), Server(), requests=80, concurrency=2)
    assert served_by(outcomes) == {"server-1"} and not any(r.error for r, _ in outcomes.values())
    assert fleet.uses["server-0"].retries > 0
    assert any("server-0 left the rotation: it took none of 16 requests in a row" in note for note in fleet.notes)


def test_a_silent_server_leaves_and_its_requests_go_elsewhere():
    async def freeze(rid, number):
        silent.healthy = False
        await asyncio.Event().wait()

    silent = Server(freeze)
    outcomes, fleet = sample(silent, Server())
    assert served_by(outcomes) == {"server-1"}
    assert any("no answer to /health within rollout.health_timeout (20 s)" in note for note in fleet.notes)


def test_a_response_that_never_ends_is_aborted():
    server = Server(lambda rid, number: asyncio.Event().wait() if rid == "r3" else None)
    outcomes, *_ = sample(server, late="r3")
    assert outcomes["r3"][0].finish_reason == "abort" and server.aborted == ["r3"]
    assert outcomes["r3"][0].error == "no response to r3 within rollout.timeout"
    assert sum(bool(r.error) for r, _ in outcomes.values()) == 1


def test_without_a_server_the_caller_is_asked_for_a_push_and_before_the_first_one_for_patience():
    def garbage(token):
        tokens = {"output_token_logprobs": [[-1.0, 7, None], [-1.0, token, None], [-1.0, 7, None]]}
        return lambda rid, _: web.json_response({"meta_info": reply(f"{rid};")["meta_info"] | tokens})

    why = "no server has the weights of step 0: server-0: it took none of 16 requests in a row; the last: "
    with pytest.raises(SyncNeeded, match=why):
        sample(Server(unavailable), pushed=True)
    for token in (10_000_000, -3):
        nonsense = rf".* answers with nonsense: token id {token} is not in the vocabulary \(0 to 127\); does it serve"
        with pytest.raises(SyncNeeded, match=why + nonsense):
            sample(Server(garbage(token)), pushed=True)
    # Not pushed to, a server that is back has the weights that it had.
    outcomes, *_ = sample(Server(unavailable), requests=8)
    assert all("lost with server-0, server-0" in r.error for r, _ in outcomes.values())


def test_the_time_without_any_server_is_not_a_requests():
    async def work():
        async with fleet_of(Server()) as fleet:
            answer = AsyncMock(side_effect=[NoServer, (Response(), "server-0")])
            await Sampling(fleet, [request], AsyncMock(), answer=answer).run()

    request = Request("r", "g", "p", [1, 2], limit=1.0)
    asyncio.run(work())
    assert request.limit is None


def test_servers_that_are_lost_for_good_end_the_run_with_one_message():
    async def lose():
        async with fleet_of(Server(), Server()) as fleet:
            await fleet.wait_started()
            for name, code in (("server-0", 9), ("server-1", 7)):
                fleet.down(name, f"exit code {code}", True)
            await fleet.begin_sync(6)

    with pytest.raises(RolloutError, match=r"^no rollout server is up; server-0: exit code 9; server-1: exit code 7$"):
        asyncio.run(lose())


def test_a_request_that_waits_for_another_server_keeps_nobody_from_the_one_it_was_lost_with():
    async def work():
        async with fleet_of(Server(), Server(), concurrency=1) as fleet:
            first, lost, later = (
                Request(n, n, "p", [1], lost=[*gone]) for n, *gone in (("a", "server-0"), ("b", "server-0"), "c")
            )
            other = await fleet.acquire(first)
            waits = asyncio.create_task(fleet.acquire(lost))
            await asyncio.sleep(0)
            free = await asyncio.wait_for(fleet.acquire(later), 60)
            fleet.release(other)
            return [other.name, free.name, (await waits).name]

    assert asyncio.run(work()) == ["server-1", "server-0", "server-1"]


def test_a_request_that_all_refuse_fails_and_one_that_one_refuses_does_not():
    def refuse(rid, number):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    def refuse_one(rid, number):
        return refuse(rid, number) if rid.startswith("r7") else None

    outcomes, *_ = sample(Server(refuse), Server(refuse_one))
    assert [name for name, (r, _) in outcomes.items() if r.error] == ["r7"]
    assert "the server refused it: too long" in outcomes["r7"][0].error
