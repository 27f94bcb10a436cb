"""Runs `dynamo-megatron plan` for the GPUs of this node."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dynamo_megatron.jobs.layout_checks import check_layout
from dynamo_megatron.planning.hardware import Cluster, gpu_named
from dynamo_megatron.planning.plan import make_plan, workload
from dynamo_megatron.planning.report import cautions, verdict
from dynamo_megatron.preflight.findings import Finding, failed, note, ok, skipped
from dynamo_megatron.preflight.subject import Subject


def plan(subject: Subject) -> Iterator[Finding]:
    """Plans memory, servers and times of the whole run, on the assumption that all its nodes are like this one."""
    if not torch.cuda.is_available():
        yield skipped("no GPU here to reckon with: dynamo-megatron plan takes --gpu and --gpus")
        return
    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    if (gpu := gpu_named(name, memory)) is None:
        yield skipped(f"{name} with {memory / 1e9:.0f} GB is not in the planner's table (planning/hardware.py)")
        return
    spec = check_layout(subject.config, subject.ranks)
    cluster = Cluster(gpu, subject.ranks, min(subject.ranks, torch.cuda.device_count()))
    made = make_plan(subject.config, spec, cluster, workload(subject.config, spec, None))
    told = f"{cluster.gpus} x {gpu.name} in {cluster.nodes} node{'s' * (cluster.nodes > 1)}: {verdict(made)}"
    yield ok(told) if made.fault is None else failed(f"{told}; `dynamo-megatron plan` has all")
    for caution in cautions(made):
        yield note(caution)
