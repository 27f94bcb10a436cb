"""What `dynamo-megatron plan` expects of a run, beside what was measured.

    python -P benchmarks/planned.py

compares every committed run on a GPU (benchmarks/results/gpu/planned.json), without one. The benchmarks compare their
own runs on a kind of GPU that the planner knows; its bytes are the peak of a rank's tensors.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
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

NO_GPU = "this machine has no GPU, and a plan is of a kind of GPU"
RESULTS = Path(__file__).parent / "results" / "gpu"
OLD = "before the layers of today: launches, attention, SwiGLU, weight gradients, Adam (docs/kernels.md)"
OLD_SYNC = "before the checksums of a push were one kernel (kernels/tile_hash.py)"
FIRST = "a server's first weight sync: it compiles its kernels, and the ranks begin"
TRAININGS = {  # file and part: why a plan of today's code need not agree
    "2026-11-26-h100/device.json training": OLD,
    "2026-11-27-h100/traces.json trace": OLD,
    "2026-11-27-h100/traces.json trace_te": OLD,
    "2026-11-27-h100/traces.json training_te": OLD,
    "2026-11-27-h100/layers.json training_old": OLD,
    "2026-11-27-h100/layers.json training": None,
    "2026-11-27-h100/layers.json training_te": None,
    "2026-11-27-h200/device.json training": None,
    "2026-11-27-h200/device.json training_te": None,
    "2026-11-27-h200/variants.json grpo, a pass": None,
    "2026-11-27-h200/variants.json grpo, the update's own": None,
    "2026-11-27-h200/lora.json training, LoRA of rank 16": None,
}
LARGE = ("trainer.micro_batch_tokens=8192",)
RECORDED = ("rollout.engine=recorded", "rollout.recorded=none")
LIVES = {  # file and part: what its configuration sets besides; a figure: why a plan of today's code need not agree
    "2026-11-26-h100/device.json live-disk": (
        ("rollout.sync.transport=disk", "trainer.micro_batch_tokens=4096"),
        {"update seconds": OLD, "logprobs seconds": OLD},
    ),
    "2026-11-27-h200/device.json live-turns": (("rollout.offload=true", *LARGE), {"push seconds": OLD_SYNC}),
    "2026-11-27-h200/device.json live-memory": (("rollout.offload=false", *LARGE), {"push seconds": OLD_SYNC}),
    "2026-11-27-h200/live_grpo.json live-memory, grpo": (
        ("rollout.offload=false", "algorithm.modulation=null", *LARGE),
        {},
    ),
}
SMOKE = "2026-11-26-h100/device.json smoke"
TURNS = "2026-11-27-h100/layers.json live-turns"  # the first part of this name that a server answered


@dataclass(frozen=True)
class Tokens:
    """Of the mean prompt and response, and of the longest sequence, in a step of the run."""

    prompt: int
    response: float
    longest: int


def gpu_here() -> tuple[GPU | None, str]:
    """The planner's row of this machine's GPU, or None and the reason why there is none."""
    if not torch.cuda.is_available():
        return None, NO_GPU
    found = torch.cuda.get_device_properties(0)
    gpu = gpu_named(found.name, found.total_memory)
    size = f"{found.total_memory / 2**30:.0f} GiB"
    return gpu, "" if gpu else f"the planner knows {', '.join(GPUS)}, and this is {found.name} of {size}"


def plan_of(config_file: Path, tokens: Tokens, gpu: GPU, ranks: int) -> Plan:
    """The plan of the config on `ranks` GPUs of that kind of one node."""
    config, _ = compose([str(config_file)], [])
    work = Workload(tokens.prompt, tokens.response, tokens.longest)
    return make_plan(config, load_model_config(config.model.path), Cluster(gpu, ranks, ranks), work)


def training_peak(plan: Plan) -> float:
    """Bytes of tensors on the fullest rank at the peak of an update; no GPU's size and no server is in it."""
    return max(sum(stage.training.values()) - stage.training.get("server", 0) for stage in plan.stages) - RESERVED


def planned(plan: Plan, update_flops: float) -> dict[str, float]:
    """The plan's figures by the names that `step_figures` of the benchmarks give the measured ones. `update_flops`: of
    an update of a step, for its share of the stated rate."""
    times, gpus = plan.times, plan.cluster.gpus
    figures = {
        "update seconds": times.update,
        "logprobs seconds": times.logprobs,
        "update MFU": update_flops / times.update / (gpus * plan.cluster.gpu.flops),
        "peak GPU bytes": training_peak(plan),
    }
    if plan.servers is not None:
        made = plan.config.rollout_budget * plan.work.response
        figures |= {
            "generate seconds": times.generate,
            "generated tokens a second and GPU": made / times.generate / gpus,
            "push seconds": times.weight_sync,
        }
    return figures


def compared(
    config_file: Path, tokens: Tokens, update_flops: float, measured: Mapping[str, Any], ranks: int
) -> dict[str, Any]:
    """What was measured in a step beside what its plan expects: {"gpu", "reason", "figures": {name: {"measured",
    "planned", "measured over planned"}}}; "planned" is null, with a reason, where the planner knows no such GPU."""
    gpu, reason = gpu_here()
    plan = plan_of(config_file, tokens, gpu or GPUS["h100-80"], ranks)  # else for the names alone
    figures = {}
    for name, value in planned(plan, update_flops).items():
        if name not in measured:
            continue
        expected, seen = (value if gpu else None), measured[name]
        over = seen / expected if expected and seen is not None else None
        figures[name] = {"measured": seen, "planned": expected, "measured over planned": over}
    return {
        "gpu": gpu.name if gpu else None,
        "reason": reason or None,
        "figures": figures,
    }


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
    median of the steps after the first, which compiles, and without one under the profiler."""
    rows = []

    def figures(run: str) -> dict[str, Any]:
        file, part = run.split(maxsplit=1)
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))[part]
        return found.get("figures", found)

    def row(run: str, figure: str, seen: list[float], expected: float, why: str | None = None) -> None:
        measured = statistics.median(seen)
        one = {"run": run, "figure": figure, "measured": measured, "planned": expected}
        rows.append({**one, "planned over measured": expected / measured, "does not apply": why})

    for run, why in TRAININGS.items():
        found, words = figures(run), [*RECORDED, *LARGE]
        if "words" in found:  # GRPO
            words += ["algorithm.modulation=null", *(word for word in found["words"] if "=" in word)]
        times = plan_of_1_5b(640, *words, gpu=gpu_of(run)).times
        steps = found.get("training", found)["steps"][1 : 2 if "trace" in run.split()[1] else None]
        for name, expected in (("update", times.update), ("logprobs", times.logprobs)):
            seen = [step.get(f"{name} seconds", step.get(f"time/{name}")) for step in steps]
            if expected:  # with the update's own log-probs there is no pass
                row(run, f"{name} seconds", seen, expected, why)
    for run, (words, whys) in LIVES.items():
        for name, expected in planned(plan_of_1_5b(1024, *words, gpu=gpu_of(run)), 0).items():
            if name.endswith("seconds") and expected:
                row(run, name, [step[name] for step in figures(run)["steps"][1:]], expected, whys.get(name))
    (served,), smoke = figures(SMOKE)["attempts"], plan_of_1_5b(1024)
    for sequences in (1, 64):
        expected = 256 * decode(smoke, sequences, 64 + 128)
        row(SMOKE, f"seconds of {sequences} x 256 tokens", [served[f"{sequences} of 256 tokens, second"]], expected)
    turns = plan_of_1_5b(1024, "rollout.server_args=[--disable-cuda-graph]")
    text = "\n".join(figures(TURNS)["server log"] + figures(TURNS)["log"])
    seen = [float(rate) for rate in re.findall(r"gen throughput \(token/s\): ([\d.]+)", text)]
    row(TURNS, "tokens a second of 64 sequences", seen[1:], 64 / decode(turns, 64, 192))
    row(TURNS, "push seconds", [float(*re.findall(r"weight sync: ([\d.]+) s", text))], turns.times.weight_sync, FIRST)
    return rows


def main() -> None:
    found = {"rates": {name: rate._asdict() for name, rate in RATES.items()}, "figures": committed()}
    text = json.dumps(found, indent=1)
    print(text)
    (RESULTS / "planned.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
