"""What `dynamo-megatron plan` expects of a run, beside what was measured.

    python -P benchmarks/planned.py

compares every committed run of today's code on a GPU (benchmarks/results/gpu/planned.json), without one.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch

from dynamo_megatron.config.files import compose
from dynamo_megatron.models import load_model_config
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.command import UNNEEDED, model_spec
from dynamo_megatron.planning.hardware import GPU, GPUS, Cluster, gpu_named
from dynamo_megatron.planning.plan import RESERVED, Plan, Workload, make_plan
from dynamo_megatron.planning.rates import RATES

RESULTS = Path(__file__).parent / "results" / "gpu"
TRAININGS = (  # file and part, of today's code
    "2026-11-27-h100/layers.json training",
    "2026-11-27-h100/layers.json training_te",
    "2026-11-27-h200/device.json training",
    "2026-11-27-h200/device.json training_te",
    "2026-11-27-h200/variants.json grpo, a pass",
    "2026-11-27-h200/variants.json grpo, the update's own",
    "2026-11-27-h200/lora.json training, LoRA of rank 16",
)
LARGE = ("trainer.micro_batch_tokens=8192",)
RECORDED = ("rollout.engine=recorded", "rollout.recorded=none")
ALL = ("generate", "update", "logprobs", "push")
LIVES = {  # file and part: what its configuration sets besides, and which of its figures are of today's code
    "2026-11-26-h100/device.json live-disk": (
        ("rollout.sync.transport=disk", "trainer.micro_batch_tokens=4096"),
        ("generate", "push"),
    ),
    "2026-11-27-h200/device.json live-turns": (("rollout.offload=true", *LARGE), ALL[:3]),
    "2026-11-27-h200/night.json live-memory": (("rollout.offload=false", *LARGE), ALL),
    "2026-11-27-h200/live_grpo.json live-memory, grpo": (
        ("rollout.offload=false", "algorithm.modulation=null", *LARGE),
        ALL[:3],
    ),
}
SMOKE = "2026-11-26-h100/device.json smoke"
TURNS = "2026-11-27-h100/layers.json live-turns"  # the first part of this name that a server answered


def gpu_here() -> GPU | None:
    """The planner's row of this machine's GPU, if there is one that it knows."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return gpu_named(found.name, found.total_memory)


def training_peak(config_file: Path, work: Workload, ranks: int) -> float:
    """Bytes of tensors that the config's plan expects on the fullest of `ranks` ranks at the peak of an update; neither
    a GPU's size nor a server is in it."""
    config, _ = compose([str(config_file)], [])
    cluster = Cluster(GPUS["h100-80"], ranks, ranks)
    plan = make_plan(config, load_model_config(config.model.path), cluster, work)
    return max(sum(stage.training.values()) - stage.training.get("server", 0) for stage in plan.stages) - RESERVED


def plan_of_1_5b(response: int, *words: str, gpu: str = "h100-80") -> Plan:
    """Of a step of the committed runs: 64 rollouts of 64 + `response` tokens of Qwen2.5-1.5B's shape on one GPU."""
    words = ("model.path=Qwen2.5-1.5B", "data.batch_prompts=8", "rollout.max_new_tokens=1024", *words)
    budget = {"algorithm": {"allocation": {"kind": "uniform", "budget": 64}}}
    config, _ = compose([], words, {**UNNEEDED, **budget})
    return make_plan(config, model_spec(config)[0], Cluster(GPUS[gpu], 1, 1), Workload(64, response, 1088))


def gpu_of(run: str) -> str:
    """By the name of its folder."""
    (name,) = (name for name in GPUS if name.partition("-")[0] in run.partition("/")[0])
    return name


def decode(plan: Plan, sequences: int, context: float) -> float:
    return formulas.decode_seconds(plan.config, plan.spec, plan.cluster.gpu, sequences, context)


def committed() -> list[dict[str, Any]]:
    """A row for each figure of update, log-probs, generation and weight sync of the committed runs. "measured": the
    median of the steps after the first, which compiles."""
    rows = []

    def figures(run: str) -> dict[str, Any]:
        file, part = run.split(maxsplit=1)
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))[part]
        return found.get("figures", found)

    def row(run: str, figure: str, seen: list[float], expected: float) -> None:
        measured = statistics.median(seen)
        one = {"run": run, "figure": figure, "measured": measured, "planned": expected}
        rows.append({**one, "planned over measured": expected / measured})

    for run in TRAININGS:
        found, words = figures(run), [*RECORDED, *LARGE]
        if "words" in found:  # GRPO
            words += ["algorithm.modulation=null", *(word for word in found["words"] if "=" in word)]
        times = plan_of_1_5b(640, *words, gpu=gpu_of(run)).times
        steps = found.get("training", found)["steps"][1:]
        for name, expected in (("update", times.update), ("logprobs", times.logprobs)):
            seen = [step.get(f"{name} seconds", step.get(f"time/{name}")) for step in steps]
            if expected:  # with the update's own log-probs there is no pass
                row(run, f"{name} seconds", seen, expected)
    for run, (words, names) in LIVES.items():
        times = plan_of_1_5b(1024, *words, gpu=gpu_of(run)).times
        expected = {"generate": times.generate, "update": times.update, "logprobs": times.logprobs}
        expected["push"] = times.weight_sync
        for name in filter(expected.get, names):
            row(run, f"{name} seconds", [step[f"{name} seconds"] for step in figures(run)["steps"][1:]], expected[name])
    (served,), smoke = figures(SMOKE)["attempts"], plan_of_1_5b(1024)
    for sequences in (1, 64):
        expected = 256 * decode(smoke, sequences, 64 + 128)
        row(SMOKE, f"seconds of {sequences} x 256 tokens", [served[f"{sequences} of 256 tokens, second"]], expected)
    turns = plan_of_1_5b(1024, "rollout.server_args=[--disable-cuda-graph]")
    text = "\n".join(figures(TURNS)["server log"] + figures(TURNS)["log"])
    seen = [float(rate) for rate in re.findall(r"gen throughput \(token/s\): ([\d.]+)", text)]
    row(TURNS, "tokens a second of 64 sequences", seen[1:], 64 / decode(turns, 64, 192))
    return rows


def main() -> None:
    found = {"rates": {name: rate._asdict() for name, rate in RATES.items()}, "figures": committed()}
    text = json.dumps(found, indent=1)
    print(text)
    (RESULTS / "planned.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
