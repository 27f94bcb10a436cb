"""Sampling on a CPU: what a request is answered with belongs to its seed."""

import asyncio
import runpy

import torch

from dynamo_megatron.config import RolloutConfig
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.servers.server import CPU_STAND_INS

PROMPTS = [[20 + i, 30, 40, 50] for i in range(4)]
REQUESTS = 16


def test_a_seeded_response_is_the_same_whatever_is_sampled_beside_it(sglang_server):
    """In another order, at another time, a few at once instead of all, beside greedy requests."""

    async def sampled(client, numbers, at_once, beside=0):
        gate, responses = asyncio.Semaphore(at_once), {}

        async def ask(number):
            async with gate:
                name = f"seeded-{at_once}-{beside}-{number}"
                prompt, seed = PROMPTS[number % len(PROMPTS)], 1000 + number // 2
                responses[number] = await client.generate(name, prompt, seed=seed)

        greedy = (client.generate(f"greedy-{at_once}-{k}", [60 + k], temperature=0, seed=k) for k in range(beside))
        await asyncio.gather(*map(ask, numbers), *greedy)
        assert not any(r.error for r in responses.values())
        return [responses[number].tokens for number in range(REQUESTS)]

    async def work():
        async with open_session() as session:
            client = SGLangClient(session, sglang_server.endpoint, RolloutConfig(max_new_tokens=24), (3,))
            return [
                await sampled(client, range(REQUESTS), REQUESTS),
                await sampled(client, reversed(range(REQUESTS)), REQUESTS, beside=5),
                await sampled(client, range(REQUESTS), 3),
            ]

    first, *others = asyncio.run(work())
    assert len({tuple(tokens) for tokens in first}) == REQUESTS  # neither seed nor prompt alone decides
    assert others == [first, first]


def test_tokens_are_drawn_by_their_probability():
    plugin = runpy.run_path(str(CPU_STAND_INS / "seeded_sampling.py"))
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    n = 40_000
    seeds, positions = torch.arange(n) * 7919 + 2**62, torch.arange(n) % 17
    for scale in (1.0, 0.9):  # rounding leaves rows that do not sum to 1
        drawn = plugin["sample"](scale * probs.repeat(n, 1), seeds, positions)
        share = torch.bincount(drawn, minlength=6) / n
        assert (share - probs).abs().max() < 4 * 0.5 / n**0.5
        assert not share[probs == 0].any()
    numbers = plugin["uniform"](torch.full((n,), 3), torch.arange(n))  # along a response
    assert len(numbers.unique()) == n and numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1]) < 4 / n**0.5
