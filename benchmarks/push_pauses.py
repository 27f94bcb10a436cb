"""What a push costs the responses under way, by how the server pauses them.

    python -P benchmarks/push_pauses.py [--requests 32] [--tokens 200] [--repetitions 5]

A server on one core generates responses of equal length, and gets other weights (from a folder) half-way. "interrupt"
is what rollout.at_push: partial does: requests are aborted, and sent again with the tokens that they have. "retract"
and "in_place" are SGLang's own pauses: the first computes the KV cache again under the new weights, the second
continues with the old one. "none": no push. The modes take turns. Reported of each, medians over the repetitions:
seconds of the "push" (from the pause until the server may continue) and of "all" (from the first request to the last
response); "gap" is the largest difference between the logprob that was returned for one of the last quarter of a
response's tokens and the one that the server computes for it afresh. Writes results/push_pauses.json. Run nothing else
meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from asynchrony import MOST, PACKAGES, prepare, server_at
from measure import machine

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.client import Response, SGLangClient, open_session
from dynamo_megatron.rollout.servers.endpoint import Endpoint
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.servers.server_api import TRANSFER_TIMEOUT, call

RESULTS = Path(__file__).parent / "results" / "push_pauses.json"
MODES = ("none", "interrupt", "retract", "in_place")
PROMPT = 12  # tokens
NOISE = 0.2  # standard deviation of the change to a weight, of the standard deviation of its matrix
ABORT_EVERY = 0.1  # seconds


async def post(endpoint: Endpoint, path: str, **payload: Any) -> Any:
    return await asyncio.to_thread(call, endpoint, path, payload, TRANSFER_TIMEOUT)


async def push(mode: str, endpoint: Endpoint, client: SGLangClient, requests: list[asyncio.Task], folder: Path) -> None:
    if mode == "interrupt":
        while True:  # as rollout/fleet.py does
            await client.abort_all()
            if not (await asyncio.wait(requests, timeout=ABORT_EVERY))[1]:
                break
    else:
        await post(endpoint, "/pause_generation", mode=mode)
    in_place = mode == "in_place"  # the cache of requests under way cannot be flushed
    await post(endpoint, "/update_weights_from_disk", model_path=str(folder), flush_cache=not in_place)
    if mode != "interrupt":
        await post(endpoint, "/continue_generation")


async def gap(endpoint: Endpoint, prompt: list[int], response: Response) -> float:
    """Largest difference over the last quarter of the response, to logprobs of the weights that the server has now."""
    count = len(response.tokens) // 4
    reply = await post(
        endpoint,
        "/generate",
        input_ids=prompt + response.tokens,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 1},
    )
    fresh = [logprob for logprob, *_ in reply["meta_info"]["input_token_logprobs"][-count:]]
    return max(abs(a - b) for a, b in zip(fresh, response.logprobs[-count:], strict=True))


async def run(
    mode: str,
    name: str,
    endpoint: Endpoint,
    client: SGLangClient,
    prompts: list[list[int]],
    tokens: int,
    at: float,
    folder: Path,
) -> dict[str, float]:
    """One round of requests, whose weights become those of `folder` after `at` seconds."""

    async def generate(i: int, tokens_so_far: list[int]) -> Response:
        left = tokens - len(tokens_so_far)
        return await client.generate(
            f"{name}-{i}-{len(tokens_so_far)}", prompts[i] + tokens_so_far, max_new_tokens=left, seed=i
        )

    begun, found = time.monotonic(), {}
    requests = [asyncio.create_task(generate(i, [])) for i in range(len(prompts))]
    if mode != "none":
        await asyncio.sleep(at)
        paused = time.monotonic()
        await push(mode, endpoint, client, requests, folder)
        found["push"] = time.monotonic() - paused
    responses = await asyncio.gather(*requests)
    if mode == "interrupt":
        rests = await asyncio.gather(*(generate(i, r.tokens) for i, r in enumerate(responses)))
        responses = [r.continued(rest) for r, rest in zip(responses, rests, strict=True)]
    found["all"] = time.monotonic() - begun
    assert {len(r.tokens) for r in responses} == {tokens}, [r.error for r in responses]
    if mode != "none":
        found["gap"] = max([await gap(endpoint, p, r) for p, r in zip(prompts, responses, strict=True)])
    return found


async def measure(server: SGLangServer, config: RolloutConfig, folders: list[Path], options: argparse.Namespace):
    await server.wait_ready()
    draw, rows, pushes = random.Random(0), [], 0
    async with open_session() as session:
        client = SGLangClient(session, server.endpoint, config, [])
        await client.freeze_gc()
        at = 0.0
        for repetition in range(-1, options.repetitions):  # the first one warms up
            for mode in MODES:
                prompts = [[draw.randrange(5, 100) for _ in range(PROMPT)] for _ in range(options.requests)]
                pushes += mode != "none"
                found = await run(
                    mode,
                    f"{mode}-{repetition}",
                    server.endpoint,
                    client,
                    prompts,
                    options.tokens,
                    at,
                    folders[pushes % 2],
                )
                if mode == "none":
                    at = found["all"] / 2
                if repetition >= 0:
                    rows.append({"mode": mode, **found})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def changed_model(folder: Path, out: Path) -> Path:
    """The same model with other weights."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for weight in weights.values():
        if weight.dim() == 2:
            weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help=f"of each response, at most {MOST}")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of this process, of the server")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    at_start = machine(PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        plain = yaml.safe_load(prepare(Path(folder), tuple(options.cores)).read_text())
        python = server_at(Path(folder) / "server-of-one-length", options.cores[1], MOST)
        config = RolloutConfig(**plain["rollout"] | {"python": str(python), "max_staleness": 1})
        model = ModelConfig(**plain["model"])
        folders = [Path(model.path), changed_model(Path(model.path), Path(folder) / "changed")]
        server = SGLangServer(config, model, Path(folder) / "log")
        server.start()
        try:
            rows = asyncio.run(measure(server, config, folders, options))
        finally:
            server.stop()
    found = {}
    for mode in MODES:
        of_mode = [row for row in rows if row["mode"] == mode]
        found[mode] = {n: statistics.median(row[n] for row in of_mode) for n in of_mode[0] if n != "mode"}
        print(mode, ", ".join(f"{name} {value:.2g}" for name, value in found[mode].items()))
    shape = {"requests": options.requests, "tokens": options.tokens, "prompt": PROMPT, "noise": NOISE}
    result = {**shape, "medians": found, "runs": rows, "machine": at_start}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
