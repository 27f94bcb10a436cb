"""What listens while a run with two ranks and two servers generates: loopback alone."""

from __future__ import annotations

import psutil
import pytest

KEYS = ("trainer.steps=400", "rollout.servers=2", "rollout.sync.transport=gloo", "checkpoint.every=500")


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_all_that_listens_is_on_one_address(workspace, start_run, step_lines):
    output = workspace / "sockets"
    run = start_run(workspace, workspace / "config.yaml", f"output_dir={output}", *KEYS)
    run.wait_until(lambda: len(step_lines(output)) >= 2, "two steps", timeout=800)
    run.look()
    found: dict[str, list[str]] = {}
    for process in (psutil.Process(run.process.pid), *run.family):
        try:
            words = " ".join(process.cmdline())
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(connection.laddr.ip, []).append(words)
        except psutil.Error:
            continue
    run.kill()
    assert found.keys() == {"127.0.0.1"} and len(found["127.0.0.1"]) >= 4, found
