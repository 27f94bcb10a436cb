"""Running SGLang servers of tiny models, and jobs of ranks that send them weights."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from preloaded import run_preloaded

from dynamo_megatron.config import ModelConfig
from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer

JOB = Path(__file__).with_name("sync_job.py")


@pytest.fixture
def start_servers():
    """start(model, dtype, tps, folder) -> servers: one of so many ranks for each of `tps`, up, server-0 and so on."""
    started = []

    def start(
        model: Path, dtype: str, tps: Sequence[int], folder: Path, quantization: str | None = None, **options
    ) -> list[SGLangServer]:
        servers = []
        for number, tp in enumerate(tps):
            config = RolloutConfig(tp=tp, start_timeout=400, quantization=quantization)
            place = {"name": f"server-{number}", "slot": number, "slots": len(tps)} | options
            log = folder / f"{place['name']}-{place.get('incarnation', 1)}.log"
            servers.append(SGLangServer(config, ModelConfig(path=str(model), dtype=dtype), log, **place))
            started.append(servers[-1])
            servers[-1].start()

        async def ready() -> None:
            await asyncio.gather(*(server.wait_ready() for server in servers))

        asyncio.run(ready())
        return servers

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def run_syncs():
    """run(folder, model=..., dtype=..., servers=..., layouts=..., transports=..., syncs=...) -> syncs as seen by rank
    0, by layout's name. The ranks' output is in the folder."""

    def run(folder: Path, *, servers: Sequence[SGLangServer], layouts: dict[str, tuple[int, dict]], **job) -> dict:
        folder.mkdir()
        job |= {"endpoints": [dataclasses.asdict(s.endpoint) for s in servers], "out": str(folder)}
        job["model"] = str(job["model"])
        job["layouts"] = [
            {"name": name, "ranks": ranks, "parallel": parallel, "first_version": 1000 * i}
            for i, (name, (ranks, parallel)) in enumerate(layouts.items())
        ]
        (folder / "job.json").write_text(json.dumps(job))
        run_preloaded(JOB, str(folder / "job.json"), log=folder / "job.log", timeout=900)
        return {name: json.loads((folder / f"{name}.json").read_text()) for name in layouts}

    return run
