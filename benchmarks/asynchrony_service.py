"""What a rollout server takes for requests that all come at once: for benchmarks/asynchrony_simulated.py."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.client import SGLangClient, open_session
from dynamo_megatron.rollout.servers.server import SGLangServer

RUNNING, PROMPTS, TOKENS = (1, 8, 32, 64), (12, 100, 250), (1, 20, 60)
REPETITIONS = 3


def probe(config: RolloutConfig, model: ModelConfig, vocab_size: int, log: Path) -> list[dict[str, float]]:
    """Seconds ("seconds", the median of a few tries) until "running" requests of "prompt" tokens each have all been
    answered with "tokens" tokens. The server's responses have exactly as many tokens as they may."""
    server = SGLangServer(config, model, log)
    server.start()
    try:
        return asyncio.run(_probe(server, config, vocab_size))
    finally:
        server.stop()


async def _probe(server: SGLangServer, config: RolloutConfig, vocab_size: int) -> list[dict[str, float]]:
    await server.wait_ready()
    rng, rows = random.Random(0), []
    ids = itertools.count()  # SGLang aborts by its id what a closed connection has asked for, two seconds after that
    async with open_session() as session:
        client = SGLangClient(session, server.endpoint, config, [])

        async def seconds(running: int, prompt: int, tokens: int) -> float:
            prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(running)]  # no shared prefix
            begun = time.monotonic()
            responses = await asyncio.gather(
                *(
                    client.generate(f"probe-{next(ids)}", p, max_new_tokens=tokens, seed=i)
                    for i, p in enumerate(prompts)
                )
            )
            assert all(len(r.tokens) == tokens for r in responses), [len(r.tokens) for r in responses]
            return time.monotonic() - begun

        await seconds(RUNNING[-1], PROMPTS[0], 5)  # warm-up
        for running in RUNNING:
            for prompt in PROMPTS:
                for tokens in TOKENS:
                    tries = sorted([await seconds(running, prompt, tokens) for _ in range(REPETITIONS)])
                    row = {"running": running, "prompt": prompt, "tokens": tokens, "seconds": tries[REPETITIONS // 2]}
                    rows.append(row)
    return rows
