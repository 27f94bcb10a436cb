"""`dynamo-megatron compare` with a real server: one start of it for all runs, kill -9 in a run, resume."""

import json

import pytest
import yaml
from background_run import Run
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
    killed = Run(workspace, "compared.yaml", command="compare")
    killed.wait_until(lambda: f"{KILLED}: started" in killed.text, "the second run", timeout=500)
    killed.look()
    killed.process.kill()
    killed.process.wait()
    before = (folder / "runs" / f"{FINISHED}.log").read_text()
    again = Run(workspace, "compared.yaml", command="compare")
    assert again.wait(timeout=500) == 0, again.text
    assert living(killed.family) == []
    assert "1 of 2 runs have ended; left: 1" in again.text and "## Final scores" in again.text
    assert (folder / "runs" / f"{FINISHED}.log").read_text() == before
    rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["rollouts"]) for row in rows] == [
        (arm, BUDGET * step) for arm in arms for step in range(STEPS + 1)
    ]
    servers = (folder / "servers" / "logs" / "sglang-server-0.log").read_text()
    assert servers.count("server_args=") == 2, "a server for each start of the comparison, and none for each run"
    assert not list((folder / "runs").glob("*/logs/sglang*"))
