"""Our client against SGLang's own, and what rank 0's side makes of many long rollouts.

    python -P benchmarks/rollout.py client        # tokens/s at 64 concurrent requests, both clients in turns
    python -P benchmarks/rollout.py collect       # 8,192 rollouts of 8k tokens: parsed, scored, recorded, batched

Without a GPU the server is SGLang's CPU engine with a tiny model. `collect` replaces the server by a process that
replays replies in SGLang's form, since the client is what is measured. Results: benchmarks/results/rollout_*.json.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from aiohttp import web

from dynamo_megatron.config import Config, ModelConfig, RolloutConfig
from dynamo_megatron.rollout.client import ANY_TOKEN, Response, open_session
from dynamo_megatron.rollout.sampling import Request, Sampling
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.servers.server import CPU_STAND_INS, SGLangServer
from dynamo_megatron.rollout.store import step_file
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.types import Prompt

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

ROOT = Path(__file__).parents[1]
PACKAGES = ("sglang", "aiohttp", "pydantic_core", "numpy", "torch")
PROMPT_TOKENS = 64
STEPS = 2


def tiny_model(folder: Path, **options: Any) -> Path:
    return runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"](folder / "model", **options)


def external(model: Path, folder: Path, url: str, **rollout: Any) -> Config:
    return Config(
        model={"path": str(model), "dtype": "float32"},
        data={"source": "none"},
        output_dir=str(folder / "run"),
        rollout={"placement": "external", "urls": [url], "api_key_env": "API_KEY", **rollout},
        reward={"functions": ["benchmark_reward:length"], "workers": 2},
    )


# -- our client and SGLang's -------------------------------------------------------------------------------------------
async def compare(server: SGLangServer, config: Config, requests: int, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each round of `requests` requests by either client, in turns; the first round of each is not kept."""
    if not torch.cuda.is_available():
        sys.path.append(str(CPU_STAND_INS))  # what its imports ask for, as in the server
    from sglang.benchmark import serving

    rollout = config.rollout
    await server.wait_ready()
    set_sglang_options(serving)
    rng = np.random.default_rng(0)
    samples: dict[str, list[float]] = {"ours": [], "sglang": []}
    async with open_session() as session:
        fleet = Fleet(config, session, [], ANY_TOKEN)
        running = asyncio.create_task(fleet.run())
        await fleet.wait_started()
        calls = {
            "ours": functools.partial(ask_ours, fleet),
            "sglang": functools.partial(ask_sglang, serving, server.endpoint.url, rollout),
        }
        for number in range(rounds + 1):
            prompts = rng.integers(5, 100, (requests, PROMPT_TOKENS)).tolist()
            for name in sorted(calls, reverse=number % 2 == 1):
                start = time.perf_counter()
                tokens = await calls[name](prompts, number)
                assert tokens == requests * rollout.max_new_tokens, "the rounds are not of equal work"
                if number:
                    samples[name].append(tokens / (time.perf_counter() - start))
        running.cancel()
        await asyncio.wait([running])
    return samples


def set_sglang_options(serving: ModuleType) -> None:
    serving.set_global_args(
        argparse.Namespace(
            temperature=1.0,
            top_p=1.0,
            disable_ignore_eos=False,
            disable_stream=True,
            return_logprob=True,
            return_routed_experts=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
        )
    )


async def ask_ours(fleet: Fleet, prompts: list[list[int]], number: int) -> int:
    """Returns the number of tokens of the responses."""
    tokens = 0

    async def take(request: Request, response: Response, server: str) -> None:
        nonlocal tokens
        assert not response.error, response.error
        tokens += len(response.tokens)

    asked = [
        Request(f"{number}-{i}", f"{number}-{i}", "p", prompt, float(fleet.config.rollout.max_new_tokens))
        for i, prompt in enumerate(prompts)
    ]
    await Sampling(fleet, asked, take).run()
    return tokens


async def ask_sglang(
    serving: ModuleType, url: str, rollout: RolloutConfig, prompts: list[list[int]], number: int
) -> int:
    """The same through SGLang's own client."""
    slots = asyncio.Semaphore(rollout.concurrency)
    # its own say what to do at an end token, too, which is the server's to say here
    same = {"sampling_params": {"temperature": 1.0, "max_new_tokens": rollout.max_new_tokens}}

    async def one(prompt: list[int]) -> int:
        request = serving.RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/generate",
            prompt_len=len(prompt),
            output_len=rollout.max_new_tokens,
            model="",
            lora_name="",
            image_data=None,
            extra_request_body=same,
        )
        async with slots:
            output = await serving.async_request_sglang_generate(request)
        assert output.success, output.error
        return output.output_len

    return sum(await asyncio.gather(*map(one, prompts)))


def interval(ours: list[float], theirs: list[float]) -> list[float]:
    """95 % of the ratio of means, by bootstrap over rounds, which are pairs."""
    a, b, rng = np.asarray(ours), np.asarray(theirs), np.random.default_rng(0)
    picked = rng.integers(0, len(a), (10000, len(a)))
    return np.percentile(a[picked].mean(1) / b[picked].mean(1), [2.5, 97.5]).tolist()


def client(options: argparse.Namespace) -> dict[str, Any]:
    found = machine(PACKAGES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model(folder)
        same_length = ["--preferred-sampling-params", '{"ignore_eos": true}']  # in all requests, of either client
        own = RolloutConfig(concurrency=64, max_new_tokens=options.tokens, server_args=same_length)
        server = SGLangServer(own, ModelConfig(path=str(model), dtype="float32"), folder / "server.log")
        for variable in ("API_KEY", "OPENAI_API_KEY"):  # ours, and the one that SGLang's client asks for
            os.environ[variable] = server.endpoint.api_key
        config = external(model, folder, server.endpoint.url, concurrency=64, max_new_tokens=options.tokens)
        server.start()
        try:
            samples = asyncio.run(compare(server, config, options.requests, options.rounds))
        finally:
            server.stop()
    ratio = float(np.mean(samples["ours"]) / np.mean(samples["sglang"]))
    return {
        "machine": found,
        "concurrency": 64,
        "requests a round": options.requests,
        "new tokens of each": options.tokens,
        "tokens per second": samples,
        "ratio": ratio,
        "ratio interval 95 %": interval(samples["ours"], samples["sglang"]),
    }


# -- many long rollouts ------------------------------------------------------------------------------------------------
def replies(length: int, vocabulary: int) -> list[bytes]:
    """A few replies to /generate as SGLang 0.5.23 writes them, of `length` tokens with logprobs."""
    rng = np.random.default_rng(0)
    bodies = []
    for _ in range(4):
        tokens, logprobs = rng.integers(5, vocabulary, length).tolist(), (-rng.exponential(1.0, length)).tolist()
        meta = {
            "id": "replayed",
            "finish_reason": {"type": "length", "length": length},
            "prompt_tokens": PROMPT_TOKENS,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": length}],
            "completion_tokens": length,
            "cached_tokens": 0,
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
        }
        bodies.append(json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}).encode())
    return bodies


def replay(port: int, length: int, vocabulary: int, last: Any) -> None:
    """Serves them; `last` is the time (monotonic) of the last reply."""
    bodies = replies(length, vocabulary)
    count = 0

    def reply_to(rid: str) -> bytes:
        return bodies[count % len(bodies)].replace(b'"replayed"', json.dumps(rid).encode(), 1)

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal count
        rid = (await request.json())["rid"]
        if isinstance(rid, str):
            count += 1
            last.value = time.monotonic()
            return web.Response(body=reply_to(rid), content_type="application/json")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for name in rid:
            count += 1
            last.value = time.monotonic()
            await stream.write(b"data: " + reply_to(name) + b"\n\n")
        return stream

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"loads": []})

    app = web.Application()
    app.router.add_post("/generate", generate)
    for path in ("/health", "/model_info", "/v1/loads"):
        app.router.add_get(path, answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def collect(options: argparse.Namespace) -> dict[str, Any]:
    found = machine(PACKAGES)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    last = context.Value("d", 0.0)
    server = context.Process(target=replay, args=(port, options.tokens, 100, last), daemon=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = tiny_model(folder, max_positions=2 * options.tokens)
        (folder / "benchmark_reward.py").write_text("def length(prompt, response):\n    return float(len(response))\n")
        os.chdir(folder)
        os.environ["API_KEY"] = "none"
        url = f"http://127.0.0.1:{port}"
        config = external(model, folder, url, concurrency=64, max_new_tokens=options.tokens, timeout=3600)
        prompts = [
            Prompt(f"p{i}", text="?", tokens=np.random.default_rng(i).integers(5, 100, PROMPT_TOKENS).tolist())
            for i in range(options.requests // 16)
        ]
        server.start()
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        worker = RolloutWorker(config, [], ANY_TOKEN)
        worker.start()
        try:
            worker.wait_ready()
            memory = Memory(besides=server.pid)
            steps = []
            for step in range(1, STEPS + 1):
                start = time.monotonic()
                result = worker.generate(step, prompts, [16] * len(prompts))
                end = time.monotonic()
                steps.append(
                    {
                        "seconds": end - start,
                        "seconds from the last reply to the batch on rank 0": end - last.value,
                        "seconds of scoring after the last reply": result.times["reward_tail"],
                    }
                )
            memory.stop()
        finally:
            worker.close()
            server.terminate()
        result.check_accounts(16 * len(prompts))
        recorded = step_file(config.output_dir, 1).stat().st_size
    return {
        "machine": found,
        "rollouts": len(result.batch.rollout_ids),
        "tokens": len(result.batch.tokens),
        "steps": steps,
        "peak bytes of rank 0, rollout process and reward workers": memory.peak,
        "recorded bytes": recorded,
    }


class Memory:
    """The most memory (proportional set size) that this process and its children had, but the process `besides`."""

    def __init__(self, besides: int):
        self.peak, self._besides, self._ended = 0, besides, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._ended.wait(0.5):
            family = [p for p in (own, *own.children(recursive=True)) if p.pid != self._besides]
            total = 0
            for process in family:
                try:
                    total += process.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, requests, tokens in (("client", client, 64, 64), ("collect", collect, 8192, 8192)):
        sub = commands.add_parser(name)
        sub.set_defaults(run=run)
        sub.add_argument("--requests", type=int, default=requests)
        sub.add_argument("--tokens", type=int, default=tokens)
        sub.add_argument("--rounds", type=int, default=100)
        sub.add_argument("--folder", help="for what is written meanwhile, about 2 GB with the defaults")
        sub.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"rollout_{name}.json")
    options = parser.parse_args()
    options.out = options.out.resolve()
    result = options.run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
