"""`dynamo-megatron preflight`: every check of a configuration, one line each, before a job waits in a queue for it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from functools import partial

import torch

from dynamo_megatron.config import Config
from dynamo_megatron.jobs.layout_checks import check_layout, describe_layout
from dynamo_megatron.preflight import (
    data_checks,
    device_checks,
    machine_checks,
    memory_saver_check,
    model_checks,
    plan_check,
    server_check,
)
from dynamo_megatron.preflight.findings import Check, Finding, ok, run_checks
from dynamo_megatron.preflight.subject import Subject
from dynamo_megatron.runtime.plain_text import show

# Checks of the job, in the order of their dependencies. Rank 0 runs them.
OF_THE_JOB = (
    ("plan", plan_check.plan),
    ("model config", model_checks.model_config),
    ("weights", model_checks.weights),
    ("round trip", model_checks.round_trip),
    ("vocabulary", model_checks.vocabulary),
    ("context length", model_checks.context_length),
    ("data", data_checks.data),
    ("template", model_checks.template),
    ("reward", data_checks.reward),
    ("evaluation", data_checks.evaluation),
)
# Checks of a node. The first rank of each node runs them.
OF_A_NODE = (
    ("ports", machine_checks.ports),
    ("disk", machine_checks.disk),
    ("host memory", machine_checks.host_memory),
    ("versions", machine_checks.versions),
    ("optional packages", lambda subject: machine_checks.optional_packages()),
    ("memory saver", memory_saver_check.memory_saver),
)
MOST_ON_A_CPU = 4  # ranks that are started


def preflight(config: Config, ranks: int, *, with_server: bool) -> int:
    """Prints the findings of each check. Returns the exit code, 1 where a check failed. Under a launcher (RANK set)
    each rank reports its own findings, with its node's name."""
    under_launcher = "RANK" in os.environ
    if under_launcher:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:  # this node's part of a run that may have more nodes
        here = min(ranks, torch.cuda.device_count() or MOST_ON_A_CPU)
    subject = Subject(config, ranks, here)
    # All ranks meet in `devices` within a minute, so it comes before the checks that only one rank runs.
    checks: list[tuple[str, Check]] = [
        ("layout", partial(layout, subject)),
        ("devices", partial(device_checks.devices, subject)),
    ]
    if subject.leads:
        checks += [(name, partial(check, subject)) for name, check in OF_THE_JOB]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        checks += [(name, partial(check, subject)) for name, check in OF_A_NODE]
    if with_server and os.environ.get("LOCAL_RANK", "0") == "0":
        checks.append(("server", partial(server_check.server, subject)))
    prefix = f"{socket.gethostname()} rank {os.environ['RANK']}: " if under_launcher else ""
    failures: list[str] = []

    def say(name: str, finding: Finding, seconds: float) -> None:
        if finding.level == "FAILED":
            failures.append(name)
        elif under_launcher and not subject.leads and finding.level == "ok":
            return  # other ranks report only problems
        show(f"{prefix}{finding.level:<7} {name}: {finding.text}  ({seconds:.1f} s)", sys.stdout)

    count = run_checks(checks, say)
    if count:
        print(f"{prefix}{count} of {len(checks)} checks failed: {', '.join(dict.fromkeys(failures))}", file=sys.stderr)
    elif subject.leads:
        print(f"{prefix}all {len(checks)} checks passed")
    return 1 if count else 0


def layout(subject: Subject) -> Iterator[Finding]:
    """Checks model, layout and the number of ranks as `train` does."""
    spec = check_layout(subject.config, subject.ranks)
    for what, text in describe_layout(subject.config, spec, subject.ranks).items():
        yield ok(f"{what}: {text}")
