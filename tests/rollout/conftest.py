"""A Generator before servers that can be made to misbehave."""

import asyncio
import contextlib
from types import MappingProxyType

import pytest
from stand_ins import VOCABULARY, external, listening

from dynamo_megatron.data.templates import decoder_of, load_tokenizer
from dynamo_megatron.rollout.generator import Generator

REWARDS = """
def slow(prompt, response):
    if prompt.prompt_id == "broken":
        raise KeyError("no answer")
    if prompt.prompt_id == "steps":
        return {"reward": 1.0, "steps": [(0, 1, 0.5), (1, len(response), -0.25)]}
    return 1.0
"""


@pytest.fixture
def with_generator(tiny_model, tmp_path, monkeypatch):
    """run(work, *servers, **rollout): `work(generator, push)` with a Generator of these servers."""
    (tmp_path / "generator_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)

    async def go(work, servers, rollout, reward, end, data, routes):
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(listening(server)) for server in servers]
            config = external(urls, output=tmp_path, **rollout)
            own = {"functions": ["generator_rewards:slow"], "workers": 1, **reward}
            model = config.model.model_copy(update={"path": str(tiny_model)})
            update = {"reward": config.reward.model_copy(update=own), "model": model}
            update["data"] = config.data.model_copy(update=data)
            decoder = decoder_of(load_tokenizer(str(tiny_model)))
            generator = Generator(config.model_copy(update=update), end, VOCABULARY, stack, decoder, routes)

            async def push(version):
                await generator.end_sync(version, dict.fromkeys(await generator.begin_sync(version)))

            await generator.open()
            return await work(generator, push)

    none = MappingProxyType({})

    def run(work, *servers, reward=none, end=(), data=none, routes=None, **rollout):
        return asyncio.run(go(work, servers, rollout, reward, end, data, routes))

    return run
