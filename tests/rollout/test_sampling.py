"""What becomes of requests when servers misbehave. The servers here are stand-ins that can be made to (real ones:
tests/rollout/test_fleet.py)."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from dynamo_megatron.config import Config
from dynamo_megatron.rollout.client import open_session
from dynamo_megatron.rollout.fleet import Fleet
from dynamo_megatron.rollout.result import PushNeeded, RolloutError
from dynamo_megatron.rollout.sampling import Request, Sampling, tail_seconds


def reply(rid: str, tokens: int = 3) -> dict:
    return {
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "length", "length": tokens},
            "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
            "output_token_logprobs": [[-1.0, 7, None]] * tokens,
        }
    }


class Server:
    """`behaviour(request id, number of the request)`: a reply, a response, or None for the usual one."""

    def __init__(self, behaviour=None, healthy: bool = True):
        self.behaviour, self.healthy = behaviour, healthy
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.under_way = self.most = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        rid = (await request.json())["rid"]
        self.asked.append(rid)
        number = len(self.asked)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0.01)
            made = self.behaviour(rid, number) if self.behaviour else None
            if asyncio.iscoroutine(made):
                made = await made
            return made if made is not None else web.json_response(reply(rid))
        finally:
            self.under_way -= 1

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json()).get("rid", "all"))
        return web.json_response({})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def answer(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": []})


@contextlib.asynccontextmanager
async def fleet_of(*servers: Server, **rollout):
    """A fleet of them, as somebody else's servers."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for server in servers:
            app = web.Application()
            app.router.add_post("/generate", server.generate)
            app.router.add_post("/abort_request", server.abort)
            app.router.add_get("/health", server.health)
            for path in ("/model_info", "/v1/loads"):
                app.router.add_get(path, server.answer)
            app.router.add_post("/flush_cache", server.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        config = Config(
            model={"path": "none"},
            data={"source": "none"},
            output_dir="none",
            rollout={"placement": "external", "urls": urls, "start_timeout": 20, "health_timeout": 1.0, **rollout},
        )
        session = await stack.enter_async_context(open_session())
        fleet = Fleet(config, session, [])
        running = asyncio.create_task(fleet.run())
        try:
            await fleet.wait_started()
            yield fleet, config.rollout
        finally:
            running.cancel()
            await asyncio.wait([running])


def sample(*servers: Server, requests: int = 40, deadline: float | None = None, pushed: bool = False, **rollout):
    """(outcomes by request: (response, server), the Sampling, the fleet) of so many requests in groups of four."""

    async def work():
        outcomes = {}

        async def take(request, response, server):
            assert request.name not in outcomes, "a second outcome"
            outcomes[request.name] = response, server

        async with fleet_of(*servers, **rollout) as (fleet, config):
            if pushed:
                endpoints = await fleet.begin_push(0)
                await fleet.end_push(0, dict.fromkeys(e.name for e in endpoints))
            asked = [Request(f"r{i}", f"g{i // 4}", f"p{i // 4}", [1, 2], 10.0) for i in range(requests)]
            limit = None if deadline is None else time.monotonic() + deadline
            sampling = Sampling(fleet, config, asked, take, limit)
            await sampling.run()
            assert len(outcomes) == requests and not any(m.load.requests for m in fleet.serving().values())
            return outcomes, sampling, fleet

    return asyncio.run(work())


def served_by(outcomes) -> set[str]:
    return {server for _, server in outcomes.values()}


def test_groups_stay_together_and_no_server_has_more_than_its_share():
    a, b = Server(), Server()
    outcomes, sampling, _ = sample(a, b, concurrency=3)
    assert max(a.most, b.most) == 3 and served_by(outcomes) == {"server-0", "server-1"}
    assert sum(use.tokens for use in sampling.uses.values()) == 120 and len(sampling.finished) == 40
    outcomes, *_ = sample(Server(), Server())
    by_group = {g: {outcomes[f"r{4 * g + k}"][1] for k in range(4)} for g in range(10)}
    assert all(len(servers) == 1 for servers in by_group.values())


@pytest.mark.parametrize("status", [503, 401, 500, "closed", "nonsense", "not json"], ids=str)
def test_a_server_that_serves_nobody_costs_no_rollout(status):
    async def close(rid):
        raise ConnectionResetError

    def misbehave(rid, number):
        if status == "closed":
            return close(rid)
        if status == "nonsense":
            return web.json_response({"meta_info": {"finish_reason": {"type": "length"}}})
        if status == "not json":
            return web.Response(text="{", content_type="application/json")
        return web.json_response({"error": {"message": "no"}}, status=status)

    outcomes, sampling, fleet = sample(Server(misbehave), Server(), requests=80)
    assert served_by(outcomes) == {"server-1"} and not any(r.error for r, _ in outcomes.values())
    assert sampling.uses["server-0"].retries > 0
    assert any("server-0 left the rotation: it took none of 16 requests in a row" in note for note in fleet.notes)


def test_a_request_that_all_refuse_fails_and_one_that_one_refuses_does_not():
    def refuse(rid, number):
        return web.json_response({"error": {"message": "too long"}}, status=400)

    def refuse_one(rid, number):
        return refuse(rid, number) if rid.startswith("r7") else None

    outcomes, *_ = sample(Server(refuse), Server(refuse_one))
    assert [name for name, (r, _) in outcomes.items() if r.error] == ["r7"]
    assert "the server refused it: too long" in outcomes["r7"][0].error


def test_a_silent_server_leaves_and_its_requests_go_elsewhere():
    def freeze(rid, number):
        silent.healthy = False
        return asyncio.sleep(60)

    silent = Server(freeze)
    started = time.monotonic()
    outcomes, _, fleet = sample(silent, Server())
    assert time.monotonic() - started < 15 and served_by(outcomes) == {"server-1"}
    assert any("no answer to /health for rollout.health_timeout (1 s)" in note for note in fleet.notes)


def test_a_response_that_never_ends_is_aborted():
    server = Server(lambda rid, number: asyncio.sleep(60) if rid == "r3" else None)
    outcomes, *_ = sample(server, timeout=0.5)
    assert outcomes["r3"][0].finish_reason == "abort" and server.aborted == ["r3"]
    assert outcomes["r3"][0].error == "no response to r3 within rollout.timeout (0.5 s)"
    assert sum(bool(r.error) for r, _ in outcomes.values()) == 1


def test_the_deadline_aborts_what_waits_and_what_is_under_way():
    server = Server(lambda rid, number: asyncio.sleep(60) if number > 10 else None)
    outcomes, *_ = sample(server, deadline=4.0, step_deadline=4.0, concurrency=4, health_timeout=60.0)
    late = [name for name, (r, _) in outcomes.items() if r.error]
    assert len(late) == 30 and all("rollout.step_deadline (4 s)" in outcomes[name][0].error for name in late)
    assert len(server.asked) == 14 and sorted(server.aborted) == sorted(server.asked[10:])


def test_without_a_server_the_caller_is_asked_for_a_push_and_before_the_first_one_for_patience():
    def refuse(rid, number):
        return web.json_response({}, status=503)

    with pytest.raises(PushNeeded, match=r"no server has the weights of step 0: server-0: it took none of 16"):
        sample(Server(refuse), pushed=True)
    # Not pushed to, a server that is back has the weights that it had.
    outcomes, *_ = sample(Server(refuse), requests=8)
    assert all("lost with server-0, server-0" in r.error for r, _ in outcomes.values())


def test_servers_that_are_not_there_are_named():
    async def work():
        config = Config(
            model={"path": "none"},
            data={"source": "none"},
            output_dir="none",
            rollout={"placement": "external", "urls": ["http://127.0.0.1:9"], "start_timeout": 5},
        )
        async with open_session() as session:
            fleet = Fleet(config, session, [])
            running = asyncio.create_task(fleet.run())
            try:
                await fleet.wait_started()
            finally:
                running.cancel()
                await asyncio.wait([running])

    with pytest.raises(RolloutError, match=r"no rollout server is up; server-0: .*127.0.0.1:9.* does not answer"):
        asyncio.run(work())


def test_the_tail_begins_when_nine_of_ten_are_there():
    assert tail_seconds([]) == 0 and tail_seconds([5.0]) == 0
    assert tail_seconds([float(i) for i in range(1, 11)]) == 1.0
    assert tail_seconds([1.0] * 8 + [3.0, 9.0]) == 6.0
