"""Starts a minimal server: two layers of random weights, a tiny KV cache, one generation."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dynamo_megatron.data.templates import end_token_ids
from dynamo_megatron.errors import InputError
from dynamo_megatron.preflight.findings import Finding, ok, skipped
from dynamo_megatron.preflight.job_checks import Subject
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server import SGLangServer

LAYERS = 2
TOKENS = 8  # generated
# Random weights and no CUDA graphs: this tests the interpreter, the kernels, the server's ranks and the protocol.
SLICE = ("--load-format", "dummy", "--max-total-tokens", "4096", "--context-length", "1024", "--disable-cuda-graph")


def server(subject: Subject) -> Iterator[Finding]:
    """Checks that SGLang starts in its interpreter and answers a request with tokens and logprobs."""
    rollout = subject.config.rollout
    if rollout.engine != "sglang" or rollout.placement == "external":
        yield skipped("this run starts no servers")
        return
    folder = Path(tempfile.mkdtemp(prefix="preflight-"))
    try:
        yield ok(asyncio.run(_try(subject, folder / "sglang.log")))
    except (RolloutError, ServerLost, TimeoutError) as error:
        # The folder is kept: the message names the log in it.
        raise InputError(
            f"{error}; if the cause is not the model's, name another rollout.python or correct rollout.server_args"
        ) from None
    shutil.rmtree(folder, ignore_errors=True)


async def _try(subject: Subject, log: Path) -> str:
    config = subject.config
    layers = json.dumps({"num_hidden_layers": min(LAYERS, subject.spec.num_layers)})
    arguments = [*config.rollout.server_args, *SLICE, "--json-model-override-args", layers]
    changes = {"server_args": arguments, "host": "127.0.0.1", "port": None, "max_new_tokens": TOKENS, "stop": []}
    rollout = config.rollout.model_copy(update=changes)
    process = SGLangServer(rollout, config.model, log)
    process.start()
    try:
        await process.wait_ready()
        async with open_session() as session:
            ends = end_token_ids(config.model.path, subject.tokenizer)
            client = SGLangClient(session, process.endpoint, rollout, ends)
            response = await client.generate("preflight", subject.tokenizer.encode("1 + 1 ="))
    finally:
        process.stop()
    if response.error or not response.tokens or len(response.logprobs) != len(response.tokens):
        raise RolloutError(f"the server starts but does not generate: {response.error or 'no tokens'}; see {log}")
    return f"SGLang started with {layers} and generated {len(response.tokens)} tokens with logprobs"
