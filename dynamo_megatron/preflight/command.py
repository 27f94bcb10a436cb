"""`dynamo-megatron preflight`: every check of a configuration, one line each, before a job waits in a queue for it."""

from __future__ import annotations

import os
import socket
import sys
from functools import partial

import torch

from dynamo_megatron.config import Config
from dynamo_megatron.preflight import job_checks, machine_checks
from dynamo_megatron.preflight.findings import Check, Finding, run_checks
from dynamo_megatron.preflight.job_checks import Subject
from dynamo_megatron.runtime.plain_text import show

# Rank 0 runs the checks of the job, in the order of their dependencies; the first rank of each node those of the node.
OF_THE_JOB = {
    "layout": job_checks.layout,
    "plan": job_checks.plan,
    "model config": job_checks.model_config,
    "weights": job_checks.weights,
    "vocabulary": job_checks.vocabulary,
    "data": job_checks.data,
    "reward": job_checks.reward,
    "evaluation": job_checks.evaluation,
}
OF_A_NODE = {
    "devices": machine_checks.devices,
    "network": machine_checks.network,
    "disk": machine_checks.disk,
    "host memory": machine_checks.host_memory,
}
MOST_ON_A_CPU = 4  # ranks that are taken to be on this node


def preflight(config: Config, ranks: int, *, with_server: bool) -> int:
    """Prints the findings of each check. Returns the exit code, 1 where a check failed. Under a launcher (RANK set)
    the first rank of each node reports its own findings, with its node's name."""
    under_launcher, leads = "RANK" in os.environ, os.environ.get("RANK", "0") == "0"
    if under_launcher:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:  # this node's part of a run that may have more nodes
        here = min(ranks, torch.cuda.device_count() or MOST_ON_A_CPU)
    subject, checks = Subject(config, ranks, here), {}
    if leads:
        checks |= OF_THE_JOB
    if os.environ.get("LOCAL_RANK", "0") == "0":
        checks |= OF_A_NODE
        if with_server:
            checks["server"] = machine_checks.server
    prefix = f"{socket.gethostname()} rank {os.environ['RANK']}: " if under_launcher else ""
    failures: list[str] = []

    def say(name: str, finding: Finding, seconds: float) -> None:
        if finding.level == "FAILED":
            failures.append(name)
        elif not leads and finding.level == "ok":
            return  # other ranks report only problems
        show(f"{prefix}{finding.level:<7} {name}: {finding.text}  ({seconds:.1f} s)", sys.stdout)

    of_subject: list[tuple[str, Check]] = [(name, partial(check, subject)) for name, check in checks.items()]
    count = run_checks(of_subject, say)
    if count:
        print(f"{prefix}{count} of {len(checks)} checks failed: {', '.join(dict.fromkeys(failures))}", file=sys.stderr)
    elif leads:
        print(f"{prefix}all {len(checks)} checks passed")
    return 1 if count else 0
