"""`report --watch` beside a run that trains, in a process of its own, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full
STEPS = 45


def watch(workspace, output, out, log):
    """The command, in a session of its own, so that a signal reaches it alone."""
    words = ["report", output, "--out", out, "--watch", "1"]
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dynamo_megatron.cli", *map(str, words)],
            cwd=workspace,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def shown(out) -> dict:
    """What the page has of the run now: `step`, `metrics`...; {} before the first writing."""
    page = out / "report.html"
    if not page.exists():
        return {}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])
    return data["runs"][0] | {"refresh": data["refresh"]}


def test_a_watch_follows_a_run_that_trains(workspace, start_run, step_lines, tmp_path):
    """One watch ends with Ctrl-C, which the run does not notice; another one with the run's last step."""
    output, logs = tmp_path / "run", [tmp_path / "stopped.log", tmp_path / "whole.log"]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    run = start_run(workspace, workspace / "config.yaml", f"output_dir={output}", f"trainer.steps={STEPS}")
    run.wait_until(lambda: step_lines(output), "the first step")
    watches = [watch(workspace, output, out, log) for out, log in zip((stopped, whole), logs, strict=True)]
    try:
        run.wait_until(lambda: shown(stopped) and shown(whole), "two pages")
        first = shown(stopped)
        assert 1 <= first["step"] < STEPS and first["refresh"] == 1 and not first["ended"]
        run.wait_until(lambda: shown(stopped)["step"] > first["step"], "a later step in the page")
        assert shown(stopped)["step"] < STEPS, "the page was not written again before the last step"
        os.killpg(watches[0].pid, signal.SIGINT)
        assert watches[0].wait(30) == 130
        assert logs[0].read_text().splitlines() == [
            f"{stopped}/report.html is written, and again about every 1 s; Ctrl-C ends this, not the run",
            "interrupted",
        ]
        assert run.process.poll() is None and run.wait() == 0, run.text[-3000:]
        assert watches[1].wait(30) == 0, logs[1].read_text()
    finally:
        for process in watches:
            process.kill()
            process.wait()
    assert logs[1].read_text().splitlines()[-1] == f"{whole}/report.html: the last step is in it"
    last = shown(whole)
    assert last["step"] == STEPS and last["ended"] and last["refresh"] is None
    assert shown(stopped)["step"] < STEPS, "written after Ctrl-C"
    print("first seen", first["step"], "when stopped", shown(stopped)["step"])
