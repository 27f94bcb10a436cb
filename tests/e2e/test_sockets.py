"""What listens while a run with two ranks and two servers generates: its addresses."""

from __future__ import annotations

import re

import psutil
import pytest

SOCKETS = {("rank", "store"), ("rank", "gloo"), ("SGLang", "HTTP"), ("SGLang", "gloo")}
KEYS = (
    "trainer.steps=400",
    "rollout.servers=2",
    "rollout.tp=2",
    "rollout.sync.transport=gloo",
    "checkpoint.every=500",
)


def listening(run) -> list[tuple[str, str, str, int]]:
    """(process, socket, address, port) of all that the run's processes listen on."""
    run.look()
    found = set()
    for process in (psutil.Process(run.process.pid), *run.family):
        try:
            words, environment = " ".join(process.cmdline()), process.environ()
            sockets = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        for address, port in sockets:
            found.add((*kind(words, environment, port), address, port))
    return sorted(found)


def kind(words: str, environment: dict[str, str], port: int) -> tuple[str, str]:
    if "sglang" in words:
        http = re.search(r"--port (\d+)", words)
        return "SGLang", "HTTP" if http and int(http[1]) == port else "gloo"
    if "dynamo_megatron.cli" in words and "RANK" in environment:
        return "rank", "store" if environment["MASTER_PORT"] == str(port) else "gloo"
    return words, "?"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_that_listens_is_on_one_address(workspace, start_run, step_lines):
    output = workspace / "sockets"
    run = start_run(workspace, workspace / "config.yaml", f"output_dir={output}", *KEYS)
    run.wait_until(lambda: len(step_lines(output)) >= 2, "two steps", timeout=800)
    found = listening(run)
    run.kill()
    print(*found, sep="\n")
    assert {address for *_, address, _ in found} == {"127.0.0.1"}, found
    assert {(process, socket) for process, socket, *_ in found} == SOCKETS
