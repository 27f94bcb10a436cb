"""`dynamo-megatron preflight`: every check of a configuration, one line each, before a job waits in a queue for it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import torch

from dynamo_megatron.config import Config
from dynamo_megatron.preflight import checks as checking
from dynamo_megatron.preflight.checks import Finding, Subject, failed, skipped
from dynamo_megatron.runtime.plain_text import error_line, on_one_line, show

# Rank 0 runs the checks of the job, in the order of their dependencies; the first rank of each node those of the node.
OF_THE_JOB = {
    "layout": checking.layout,
    "plan": checking.plan,
    "model config": checking.model_config,
    "weights": checking.weights,
    "vocabulary": checking.vocabulary,
    "data": checking.data,
    "reward": checking.reward,
    "evaluation": checking.evaluation,
}
OF_A_NODE = {
    "devices": checking.devices,
    "network": checking.network,
    "disk": checking.disk,
    "host memory": checking.host_memory,
    "GPU server": checking.gpu_server,
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
            checks["server"] = checking.server
            with contextlib.suppress(ValueError, OSError):  # the check will say it
                _ = subject.server
    prefix = f"{socket.gethostname()} rank {os.environ['RANK']}: " if under_launcher else ""
    bad: dict[str, None] = {}
    raised: set[str] = set()
    for name, check in checks.items():
        start = time.monotonic()
        for finding in findings(check, subject, raised):
            if finding.level == "FAILED":
                bad[name] = None
            if leads or finding.level != "ok":  # other ranks report only problems
                seconds = time.monotonic() - start
                show(f"{prefix}{finding.level:<7} {name}: {finding.text}  ({seconds:.1f} s)", sys.stdout)
    if bad:
        print(f"{prefix}{len(bad)} of {len(checks)} checks failed: {', '.join(bad)}", file=sys.stderr)
    elif leads:
        print(f"{prefix}all {len(checks)} checks passed")
    return 1 if bad else 0


def findings(check: Callable[[Subject], Iterator[Finding]], subject: Subject, raised: set[str]) -> Iterator[Finding]:
    """What a check finds. It fails if it raises an exception, and counts as skipped if that has `raised` before, since
    both need the same thing."""
    try:
        yield from check(subject)
    except Exception as error:  # also the user's own data source and reward: the other checks must still run
        text = on_one_line(str(error)) if isinstance(error, ValueError) else error_line(error)
        yield skipped("not checked: it needs what failed above") if text in raised else failed(text)
        raised.add(text)
