"""Steps of `dynamo-megatron train` with a real SGLang server beside one rank, in the ways that a bring-up tries one
after the other (docs/gpu.md): weights through files, through the rank's memory, and memory in turns.

The model is random, so that no response ends before its limit; the reward is of its text's length. No network.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from training_steps import TEMPLATE, Work, start_here, write_model

GAP_BAR = 0.05  # nats, mean |policy - engine logprob| of a step, in bfloat16
STEPS = 5
REWARD = "def parity(prompt, response):\n    return float(len(response) % 2)\n"
WAYS = {  # transport on a GPU, on a CPU; whether server and rank take turns with memory
    "live-disk": ("disk", "disk", False),
    "live-memory": ("ipc", "tensor", False),
    "live-turns": ("ipc", "tensor", True),
    "live-ranks": ("ipc", "tensor", True),  # on all GPUs of the machine, with servers on each
}


@dataclass(frozen=True)
class Servers:
    """`python`: an interpreter that has SGLang; None: this one. `arguments`: of sglang.launch_server, on a GPU."""

    python: str | None = None
    arguments: tuple[str, ...] = ()
    memory_fraction: float = 0.3


def servers_of(way: str) -> int | None:
    """How many servers a run has; None: as many as fill the ranks' GPUs."""
    return None if way == "live-ranks" else 1


def prepare(way: str, work: Work, folder: Path, server: Servers) -> Path:
    """Problems, reward and config of a run, in an empty folder; returns the config's path."""
    on_gpu, on_cpu, turns = WAYS[way]
    servers = servers_of(way)
    model, problems = write_model(work, folder)
    (folder / "live_reward.py").write_text(REWARD, encoding="utf-8")
    config = {
        "model": {"path": str(model), "dtype": work.dtype},
        "data": {"source": str(problems), "template": TEMPLATE, "batch_prompts": work.prompts},
        "rollout": {
            **({} if servers is None else {"servers": servers}),
            "python": server.python,
            "server_args": list(server.arguments) if torch.cuda.is_available() else [],
            "max_new_tokens": max(work.response_tokens),
            "memory_fraction": server.memory_fraction,
            "offload": turns,
            "sync": {"transport": on_gpu if torch.cuda.is_available() else on_cpu},
        },
        "reward": {"functions": ["live_reward:parity"], "workers": 1},
        "algorithm": {"allocation": {"kind": "uniform", "budget": work.prompts * work.rollouts}},
        "optimizer": {"warmup_steps": 0},
        "trainer": {"steps": STEPS, "micro_batch_tokens": work.micro_batch_tokens},
        "checkpoint": {"every": None, "export_hf": "never", "keep_last": 1},
        "output_dir": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "config.yaml"


def step_figures(line: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """Of one line of metrics.jsonl of a run on `ranks` GPUs."""
    return {
        "step": line["step"],
        "seconds": line["time/step"],
        "generate seconds": line["time/generate"],
        "push seconds": line["time/weight_sync"],
        "push bytes": line["weight_sync/bytes"],
        "push floor bytes": line["weight_sync/floor_bytes"],
        "memory seconds": line.get("time/memory"),
        "update seconds": line["time/update"],
        "logprobs seconds": line["time/logprobs"],
        "peak GPU bytes": line["resources/gpu_memory_max"] or None,
        "generated tokens a second and GPU": line["rollout/response_tokens"] / line["time/generate"] / ranks,
        "tokens a second and GPU": line["throughput/tokens_per_second"] / ranks,
        "gap": line.get("rollout/logprob_gap_mean"),
        "rejected": line["rollout/rejected"],
        "restarts": line["fleet/restarts"],
        "rollouts by server": {
            name.split("/")[1]: count
            for name, count in line.items()
            if name.startswith("fleet/") and name.endswith("/rollouts")
        },
    }


def wrong_with(way: str, steps: list[dict[str, Any]]) -> list[str]:
    """What the figures of a run's steps must not be, a line each."""
    found = []
    if len(steps) != STEPS:
        found.append(f"{len(steps)} steps of {STEPS}")
    for step in steps:
        if not step["gap"] <= GAP_BAR:
            found.append(f"step {step['step']}: gap {step['gap']:.3g} is above {GAP_BAR}")
        if step["rejected"]:
            found.append(f"step {step['step']}: {step['rejected']:g} rollouts rejected")
        if WAYS[way][2] and not step["memory seconds"]:
            found.append(f"step {step['step']}: no memory was released")
    return found


def run(
    way: str,
    work: Work,
    folder: Path,
    server: Servers,
    timeout: float,
    ranks: int = 1,
) -> dict[str, Any]:
    """Runs the steps on `ranks` ranks in `folder`, which is emptied first and left with the logs, and returns the
    figures. "headline" is the last step: the first ones compile and fill caches."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = prepare(way, work, folder, server)
    ended = start_here(["train", str(config)], folder, timeout, ranks)
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    steps = [step_figures(json.loads(line), ranks) for line in lines]
    wrong = wrong_with(way, steps)
    of_last = {"headline": steps[-1]} if steps else {}
    shutil.rmtree(folder / "run" / "push", ignore_errors=True)
    return {**ended, "way": way, "ranks": ranks, "steps": steps, **of_last, "wrong": wrong}
