"""The table and the lines of docs/clusters.md, from the configs and the planner:

python -P tests/planning/clusters_table.py       # rewrites them
"""

from __future__ import annotations

import re
from pathlib import Path

from dynamo_megatron.config.files import compose
from dynamo_megatron.jobs.layout_checks import check_ranks
from dynamo_megatron.launcher.options import JobOptions
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning.command import UNNEEDED, model_spec
from dynamo_megatron.planning.hardware import GIB, GPUS, Cluster
from dynamo_megatron.planning.plan import RESERVED, Plan, make_plan, workload
from dynamo_megatron.planning.report import layout

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
DOCUMENT = ROOT / "docs" / "clusters.md"
PAPER = CONFIGS / "paper.yaml"
ORDER = [name.lower() for name in PUBLISHED]
ON_HARDWARE = sorted(CONFIGS.glob("hardware/*/*.yaml"), key=lambda file: (ORDER.index(file.stem), file.parent.name))
TITLES = [
    "model",
    "GPUs",
    "layout",
    "state",
    "activations, head",
    "update",
    "generate",
    "save",
    "of",
    "sequences",
    "step",
]


# The prompts and rollouts that methods/dynamo is for: as many rollouts as the paper's, two of each prompt.
SHAPE = "data.batch_prompts=4096 algorithm.allocation.rollout_n_min=1"


def planned(hardware: Path, method: str) -> Plan:
    """The plan of `configs/hardware/KINDxN/MODEL.yaml` with a method at the paper's sizes."""
    files = [CONFIGS / "models" / hardware.name, hardware, PAPER, CONFIGS / "methods" / f"{method}.yaml"]
    config, _ = compose([str(file) for file in files], SHAPE.split() if method == "dynamo" else [], UNNEEDED)
    kind, gpus = hardware.parent.name.split("x")
    (gpu,) = (gpu for name, gpu in GPUS.items() if name.startswith(kind))
    spec, _ = model_spec(config)
    cluster = Cluster(gpu, int(gpus), 8)
    check_ranks(config, spec, cluster.gpus)
    return make_plan(config, spec, cluster, workload(config, spec, None))


def generated() -> str:
    rows, lines = [TITLES, ["---"] * len(TITLES)], []
    for file in ON_HARDWARE:
        plan = planned(file, "dynamo")
        fullest = max(plan.stages, key=lambda stage: stage.peak)
        working = fullest.training["activations"] + fullest.training["head, backward"]
        phases = (sum(fullest.training.values()), fullest.others["generate"], fullest.others["save"])
        figures = [fullest.static.total, working, *(phase + RESERVED for phase in phases)]
        rows.append(
            [
                file.stem,
                f"{plan.cluster.gpus} {plan.cluster.gpu.name}",
                layout(plan.config, plan.dp),
                *(f"{value / GIB:.1f}" for value in (*figures, plan.cluster.gpu.memory)),
                f"{plan.servers.count} x {plan.servers.longest_sequences:.0f}",
                f"{plan.times.step:.0f}",
            ]
        )
        configs = f"configs/models/{file.name} {file.relative_to(ROOT)} configs/paper.yaml configs/methods/dynamo.yaml"
        keys = f"{SHAPE} model.path=/models/{plan.config.model.path.split('/')[-1]} data.source=/data/train.parquet"
        host = "rollout.host=ib0 " if plan.cluster.nodes > 1 else ""
        words = f"{configs} {keys} {host}output_dir=/runs/{file.stem}"
        job = f"--nodes {plan.cluster.nodes} --gpus-per-node 8 --time 24:00:00"
        nemo = f"--mem {plan.host.asked} --executor slurm --account $ACCOUNT --venv .venv"
        if plan.stop_before > JobOptions.stop_before:
            nemo = f"--stop-before {plan.stop_before} {nemo}"
        lines += [
            f"# {file.stem} on {plan.cluster.gpus} {plan.cluster.gpu.name}",
            f"dynamo-megatron launch slurm {words} {job} --gpu {plan.cluster.gpu.name}",
            f".venv-extra/bin/dynamo-megatron launch nemo {words} {job} {nemo}",
            "",
        ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n## The lines\n\n```\n" + "\n".join(lines).rstrip() + "\n```\n"


def document(text: str) -> str:
    """The page with its generated part as it is now."""
    found = re.compile(r"(<!-- generated -->\n).*?(<!-- /generated -->)", re.DOTALL)
    assert found.search(text)
    return found.sub(lambda marks: f"{marks[1]}{generated()}{marks[2]}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
