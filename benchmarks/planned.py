"""What `dynamo-megatron plan` expects of a run that a benchmark has made, beside what was measured.

The plan's seconds are floors: each product and each byte at the rate that the GPU's maker states. Its bytes are the
peak of a rank's tensors. Both are of a kind of GPU, so that on a CPU there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynamo_megatron.config.files import compose
from dynamo_megatron.models import load_model_config
from dynamo_megatron.planning.hardware import GPU, GPUS, Cluster, gpu_named
from dynamo_megatron.planning.plan import RESERVED, SLOWEST, Plan, Workload, make_plan

NO_GPU = "this machine has no GPU, and a plan is of a kind of GPU"


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
    """Bytes of tensors on the fullest rank at the peak of an update; no GPU's size is in it."""
    return max(sum(stage.training.values()) for stage in plan.stages) - RESERVED


def planned(plan: Plan, update_flops: float) -> dict[str, float]:
    """The plan's figures by the names that `step_figures` of the benchmarks give the measured ones. `update_flops`: of
    an update of a step, for the share of the stated rate that its floor allows."""
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
        "note": f"seconds are floors; real log-probs and updates take up to {SLOWEST} times as long",
        "figures": figures,
    }
