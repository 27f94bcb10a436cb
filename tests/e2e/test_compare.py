"""`dynamo-megatron compare` with real servers: one start of them for all runs, kill -9, resume, a run that fails."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.full, pytest.mark.timeout(2400)]
STEPS, BUDGET = 3, 24
LIMIT = 600  # seconds of a comparison; a third of it on two idle cores
FINISHED, KILLED, BROKEN = (f"{arm}-lr0.003-seed0" for arm in ("grpo", "dynamo", "broken"))


@pytest.fixture(scope="module")
def compare(workspace):
    """start(name): the comparison with output_dir workspace/NAME, in the background: (process, console)."""
    started = []
    fails = "def fails(prompt, response):\n    raise KeyError('this reward has no such entry')\n"
    (workspace / "broken_reward.py").write_text(fails)
    broken = ["methods/grpo", "reward.functions=[broken_reward:fails]"]
    base = [
        str(workspace / "config.yaml"),
        f"trainer.steps={STEPS}",
        "checkpoint={every: 1, export_hf: never}",
        f"eval={{data: {workspace / 'problems.jsonl'}, samples: 4, k: [1, 4], every: 1}}",
    ]

    def start(name: str) -> tuple[subprocess.Popen, Path]:
        spec = {
            "base": base,
            "arms": {"grpo": ["methods/grpo"], "dynamo": ["methods/dynamo"], "broken": broken},
            "control": "grpo",
            "seeds": [0],
            "learning_rates": [3e-3],
            "output_dir": str(workspace / name),
        }
        (workspace / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
        console = workspace / f"{name}-{len(started)}.log"
        with open(console, "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynamo_megatron.cli", "compare", f"{name}.yaml"],
                cwd=workspace,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process, console

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()  # its runs and servers end with it
            process.wait()


def figures(folder: Path) -> tuple[list[dict], dict]:
    """curves.jsonl and comparison.json without what is measured by a clock."""
    rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    found = json.loads((folder / "comparison.json").read_text())
    for row in rows:
        del row["seconds"], row["eval/seconds"]
    for arm in found["arms"].values():
        for cost in arm["cost"].values():
            del cost["seconds"]
    return rows, found


def test_killed_and_resumed_it_comes_to_the_same(compare, workspace):
    process, console = compare("straight")
    assert process.wait(timeout=LIMIT) == 1, console.read_text()[-3000:]
    straight, text = workspace / "straight", console.read_text()
    assert f"run 1 of 3, {FINISHED}: finished" in text and f"run 3 of 3, {BROKEN}: failed (exit code 1)" in text
    assert text.index(f"run 1 of 3, {FINISHED}: started") < text.index(f"{FINISHED}: finished")
    assert "this reward has no such entry" in text and "- **broken: 1 of 1 runs failed**" in text
    rows, found = figures(straight)
    assert [r["rollouts"] for r in rows if r["arm"] == "grpo"] == [BUDGET * step for step in range(STEPS + 1)]
    assert all(r["tokens"] > r["rollouts"] for r in rows if r["step"])
    assert found["arms"]["broken"]["failed"] == 1 and found["arms"]["broken"]["final"]["score"] is None
    servers = (straight / "servers" / "logs" / "sglang-server-0.log").read_text()
    assert servers.count("server_args=") == 1, "the servers stay up from run to run"
    assert not list((straight / "runs").glob("*/logs/sglang*"))

    process, console = compare("killed")
    folder, deadline = workspace / "killed" / "runs", time.monotonic() + 200
    while not (folder / KILLED / "checkpoints" / "step-000001").is_dir():
        assert process.poll() is None and time.monotonic() < deadline, console.read_text()[-3000:]
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / f"{KILLED}.json").exists(), "it was to be killed in the middle of a run"
    before = (folder / f"{FINISHED}.log").read_text()
    process, console = compare("killed")
    assert process.wait(timeout=LIMIT) == 1, console.read_text()[-3000:]
    left = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    with contextlib.suppress(psutil.NoSuchProcess):
        assert left == [], [p.cmdline() for p in left]
    assert "1 of 3 runs have ended before" in console.read_text()
    assert "the run there goes on" in (folder / f"{KILLED}.log").read_text()
    assert (folder / f"{FINISHED}.log").read_text() == before
    assert figures(workspace / "killed") == (rows, found)

    changed = yaml.safe_load((workspace / "killed.yaml").read_text())
    changed["arms"] = {name: [*keys, "algorithm.loss.clip_ratio_high=0.3"] for name, keys in changed["arms"].items()}
    (workspace / "killed.yaml").write_text(yaml.safe_dump(changed))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dynamo_megatron.cli", "compare", "killed.yaml"],
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "the run there has another algorithm.loss.clip_ratio_high than the spec asks for" in done.stderr
