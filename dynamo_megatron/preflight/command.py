"""`dynamo-megatron preflight`: every check of a configuration, one line each, before a job waits in a queue for it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

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
Check = Callable[[], Iterator[Finding]]


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


def run_checks(checks: Sequence[tuple[str, Check]], say: Callable[[str, Finding, float], None]) -> int:
    """Runs all (name, check). Returns the number of checks that failed.

    `say` is called with the check's name, each finding and the check's seconds so far. A check fails if it yields a
    `failed` finding or raises an exception. If it raises the same error as an earlier check, since both need the same
    thing, it counts as skipped.
    """
    failures: set[str] = set()
    count = 0
    for name, check in checks:
        start = time.monotonic()
        bad = False
        try:
            for finding in check():
                say(name, finding, time.monotonic() - start)
                bad |= finding.level == "FAILED"
        except Exception as error:  # also the user's own data source and reward: the other checks must still run
            text = on_one_line(str(error)) if isinstance(error, ValueError) else error_line(error)
            if text in failures:
                finding = skipped("not checked: it needs what failed above")
            else:
                failures.add(text)
                finding, bad = failed(text), True
            say(name, finding, time.monotonic() - start)
        count += bad
    return count
