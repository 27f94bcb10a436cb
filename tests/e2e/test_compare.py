"""`dynamo-megatron compare` with a real server: one start of it for all runs, kill -9 in a run, resume."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import yaml
from living_processes import living

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
STEPS, BUDGET = 2, 24
FINISHED, KILLED = (f"{arm}-lr0.003-seed0" for arm in ("grpo", "dynamo"))


def test_killed_and_resumed_it_comes_to_its_tables(workspace):
    folder = workspace / "compared"
    base = [
        str(workspace / "config.yaml"),
        f"trainer.steps={STEPS}",
        "checkpoint={every: 1, export_hf: never}",
        f"eval={{data: {workspace / 'problems.jsonl'}, samples: 1, k: [1], every: 1}}",
    ]
    arms = {"grpo": ["methods/grpo"], "dynamo": ["methods/dynamo"]}
    spec = {"base": base, "arms": arms, "control": "grpo", "seeds": [0], "learning_rates": [3e-3]}
    (workspace / "compared.yaml").write_text(yaml.safe_dump(spec | {"output_dir": str(folder)}, sort_keys=False))
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "compare", "compared.yaml"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            command,
            cwd=workspace,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    process = start()
    try:
        for line in process.stdout:
            if f"{KILLED}: started" in line:
                break
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before = (folder / "runs" / f"{FINISHED}.log").read_text()
        process = start()
        text = process.communicate()[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, text
    assert living(family) == []
    assert "1 of 2 runs have ended before" in text and "## Final scores" in text
    assert (folder / "runs" / f"{FINISHED}.log").read_text() == before
    rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["rollouts"]) for row in rows] == [
        (arm, BUDGET * step) for arm in arms for step in range(STEPS + 1)
    ]
    servers = (folder / "servers" / "logs" / "sglang-server-0.log").read_text()
    assert servers.count("server_args=") == 2, "a server for each start of the comparison, and none for each run"
    assert not list((folder / "runs").glob("*/logs/sglang*"))
