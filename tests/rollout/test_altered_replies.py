"""Servers whose replies are altered on their way: none ends the run, and none is trained on as it is."""

import asyncio
import contextlib
import random
from collections import Counter

import numpy as np
import pytest
from aiohttp import web
from alterations import KINDS
from altering_proxy import AlteringProxy, Attempt
from stand_ins import VOCABULARY, Server, event, external, listening, open_stream

from dynamo_megatron.algorithm.rejection import rejections
from dynamo_megatron.rollout.client import Response, open_session
from dynamo_megatron.rollout.sampling import Request, Sampling
from dynamo_megatron.rollout.servers import supervisor
from dynamo_megatron.rollout.servers.fleet import Fleet

MAX_GAP = 0.3  # nats, rollout.proof.max_mean_gap's default


def response_to(rid: str) -> dict:
    """A reply that no other request gets."""
    rng = random.Random(rid)
    tokens = [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(1, 6))]
    finish = {"type": "length", "length": 6} if len(tokens) == 6 else {"type": "stop", "matched": tokens[-1]}
    return {
        "text": "".join(map(chr, tokens)),
        "output_ids": tokens,
        "meta_info": {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": 2,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
            "completion_tokens": len(tokens),
            "e2e_latency": 0.01,
            "output_token_logprobs": [[-rng.expovariate(1.0), token, None] for token in tokens],
        },
    }


def stand_in() -> Server:
    async def lists(request, rids):
        stream = await open_stream(request)
        for rid in rids:
            await stream.write(event(response_to(rid)))
        await stream.write(b"data: [DONE]\n\n")
        return stream

    return Server(lambda name, number: web.json_response(response_to(f"{name};")), lists=lists)


async def sample(proxies: list[AlteringProxy], requests: int, at_once: int, **rollout) -> dict[str, Response]:
    """The outcome of each request, by name."""
    outcomes: dict[str, Response] = {}

    async def take(request, response, server):
        assert request.name not in outcomes, "a second outcome"
        outcomes[request.name] = response

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(proxy.listening()) for proxy in proxies]
        config = external(urls, max_new_tokens=6, **rollout)
        session = await stack.enter_async_context(open_session())
        fleet = Fleet(config, session, [], VOCABULARY)
        running = asyncio.create_task(fleet.run())
        try:
            await fleet.wait_started()
            for first in range(0, requests, at_once):
                names = [f"r{i}" for i in range(first, min(requests, first + at_once))]
                asked = [Request(name, name, name, [20, 30], 6.0, seed=i) for i, name in enumerate(names, first)]
                await Sampling(fleet, asked, take).run()
        finally:
            running.cancel()
            await asyncio.wait([running])
    assert len(outcomes) == requests and not any(proxy.other_hosts for proxy in proxies)
    return outcomes


def tokens_of(attempt: Attempt) -> list[tuple[int, float]]:
    """As the server said them."""
    return [(token, logprob) for logprob, token, _ in attempt.meta["output_token_logprobs"]]


def same_meaning(response: Response, attempt: Attempt) -> bool:
    """Whether the tokens and the end, which alone cannot be checked later, are what the server said. Logprobs and
    versions are compared with the policy's before training, which `rejected` does."""
    if response.finish_reason != attempt.meta["finish_reason"]["type"]:
        return False
    return response.tokens == [token for token, _ in tokens_of(attempt)]


def honest(response: Response, attempt: Attempt) -> bool:
    said = list(zip(response.tokens, response.logprobs, strict=True))
    return attempt.alteration is None and said == tokens_of(attempt)


def rejected(response: Response, attempt: Attempt) -> bool:
    """By training's own rule, with the server's own logprobs for the policy's."""
    policy = np.array([logprob for _, logprob in tokens_of(attempt)])
    engine = np.array(response.logprobs, np.float32)
    versions = np.concatenate([np.full(end - start, version) for version, start, end in response.weight_versions])
    return bool(rejections(policy, engine, np.array([len(policy)]), versions, 0, MAX_GAP))


def account(outcomes: dict[str, Response], proxies: list[AlteringProxy]) -> dict[str, Counter]:
    """kind -> what became of the altered replies of that kind. Every one of them is some request's, by id."""
    became: dict[str, Counter] = {}
    for proxy in proxies:
        assert proxy.attempts.keys() <= outcomes.keys()
    for name, response in outcomes.items():
        attempts = [attempt for proxy in proxies for attempt in proxy.attempts[name]]
        if not response.error:
            sources = [a for a in attempts if honest(response, a)] or [a for a in attempts if same_meaning(response, a)]
            assert sources, (name, response, [a.alteration and a.alteration.what for a in attempts])
            source = sources[-1]
        for attempt in attempts:
            if attempt.alteration is None:
                continue
            if response.error:
                fate = "failed"
            elif attempt is not source:
                fate = "asked again"
            else:
                same = [logprob for _, logprob in tokens_of(attempt)] == response.logprobs
                fate = "same meaning" if same else f"logprobs within {MAX_GAP} nats"
                fate = "rejected before training" if rejected(response, attempt) else fate
            became.setdefault(attempt.alteration.kind, Counter())[fate] += 1
    return became


def show(became: dict[str, Counter]) -> int:
    for kind, fates in sorted(became.items()):
        print(f"{kind:15} {sum(fates.values()):5}  {', '.join(f'{n} {fate}' for fate, n in sorted(fates.items()))}")
    return sum(sum(fates.values()) for fates in became.values())


def test_altered_replies_end_nothing_and_none_is_trained_on(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.05)

    async def work():
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(stand_in())) for _ in range(2)]
            proxies = [AlteringProxy(url, seed, 0.5) for seed, url in enumerate(urls)]
            return await sample(proxies, 400, 50, health_timeout=20.0, timeout=60.0), proxies

    outcomes, proxies = asyncio.run(work())
    became = account(outcomes, proxies)
    altered = show(became)
    assert altered >= 100 and became.keys() == set(KINDS), became
    assert sum(not r.error for r in outcomes.values()) >= 300


@pytest.mark.full
def test_5000_altered_replies_of_real_servers(sglang_server, monkeypatch):
    """`-s` shows what became of them by kind."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.05)
    monkeypatch.setenv("ALTERED_KEY", sglang_server.endpoint.api_key)
    options = {"api_key_env": "ALTERED_KEY", "health_timeout": 60.0, "timeout": 120.0}
    total: dict[str, Counter] = {}
    altered, seed, failed = 0, 0, 0
    while altered < 5000:
        proxies = [AlteringProxy(sglang_server.endpoint.url, seed + i, 0.5) for i in range(2)]
        outcomes = asyncio.run(sample(proxies, 500, 100, **options))
        for kind, fates in account(outcomes, proxies).items():
            total.setdefault(kind, Counter()).update(fates)
        altered = sum(sum(fates.values()) for fates in total.values())
        failed += sum(bool(r.error) for r in outcomes.values())
        seed += 2
    print(f"{seed * 250} requests, {failed} without a response")
    assert show(total) >= 5000 and total.keys() == set(KINDS)
