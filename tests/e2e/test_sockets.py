"""What listens while a run with two ranks and two servers generates: its addresses, and docs/security.md's table."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from dynamo_megatron.runtime.free_ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
ENDPOINT = free_port()
KEYS = (
    f"tracking.openmetrics={ENDPOINT}",
    "trainer.steps=400",
    "rollout.servers=2",
    "rollout.tp=2",
    "rollout.sync.transport=gloo",
    "checkpoint.every=500",
)


def table() -> set[tuple[str, str]]:
    """(process, socket) of the rows of the page's table of what listens."""
    section = PAGE.read_text().partition("## What listens")[2].partition("\nWhat others open")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|", section, re.MULTILINE)
    return {(process.strip(), socket.strip()) for process, socket in rows[1:]}  # without the head


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
    if "tracker_process openmetrics" in words and port == ENDPOINT:
        return "tracker", "OpenMetrics"
    return words, "?"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_that_listens_is_on_one_address_and_in_the_table(workspace, start_run, step_lines):
    output = workspace / "sockets"
    run = start_run(workspace, workspace / "config.yaml", f"output_dir={output}", *KEYS)
    run.wait_until(lambda: len(step_lines(output)) >= 2, "two steps", timeout=800)
    run.wait_until(lambda: any(port == ENDPOINT for *_, port in listening(run)), "the OpenMetrics endpoint")
    found = listening(run)
    run.kill()
    print(*found, sep="\n")
    assert {address for *_, address, _ in found} == {"127.0.0.1"}, found
    assert {(process, socket) for process, socket, *_ in found} == table()
