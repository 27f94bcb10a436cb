"""Steps of `dynamo-megatron train` with a real SGLang server beside one rank, in the ways that a bring-up tries one
after the other (docs/gpu.md): weights through files, through the rank's memory, and memory in turns.

The model is random, so that no response ends before its limit; the reward is of its text's length. No network.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from training_steps import Work, prepare, train_here

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
    cuda, (on_gpu, on_cpu, turns) = torch.cuda.is_available(), WAYS[way]
    rollout = {
        "python": server.python,
        "server_args": list(server.arguments) if cuda else [],
        "memory_fraction": server.memory_fraction,
        "offload": turns,
        "sync": {"transport": on_gpu if cuda else on_cpu},
        **({} if way == "live-ranks" else {"servers": 1}),  # else as many as fill the ranks' GPUs
    }
    prepare(work, folder, STEPS, rollout, reward={"functions": ["live_reward:parity"], "workers": 1})
    (folder / "live_reward.py").write_text(REWARD, encoding="utf-8")
    ended, lines = train_here(folder, timeout, ranks)
    steps = [step_figures(line, ranks) for line in lines]
    wrong = wrong_with(way, steps)
    of_last = {"headline": steps[-1]} if steps else {}
    shutil.rmtree(folder / "run" / "push", ignore_errors=True)
    return {**ended, "way": way, "ranks": ranks, "steps": steps, **of_last, "wrong": wrong}
