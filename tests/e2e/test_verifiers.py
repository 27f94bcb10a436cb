"""A run whose episodes are those of a verifiers environment, under verifiers' interpreter: VERIFIERS_PYTHON or
.venv-verifiers/bin/python (make verifiers)."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_megatron.rollout.store import read_rollouts, step_file

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("VERIFIERS_PYTHON", str(ROOT / ".venv-verifiers" / "bin" / "python"))
ENVIRONMENT = {"taskset": {"id": "guess_taskset"}}
AGENT = f"from dynamo_megatron.agents.verifiers import verifiers_agent\nagent = verifiers_agent({ENVIRONMENT})\n"
STEPS = 3
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path(PYTHON).is_file(), reason=f"no {PYTHON} (make verifiers)"),
]


@pytest.fixture(scope="module")
def rows(workspace) -> Path:
    """The environment's tasks, as rows."""
    shutil.copy(Path(__file__).with_name("guess_taskset.py"), workspace)
    (workspace / "live_verifiers.py").write_text(AGENT)
    words = ["-m", "dynamo_megatron.agents.verifiers", json.dumps(ENVIRONMENT), "guesses.jsonl"]
    subprocess.run([PYTHON, *words], cwd=workspace, check=True, timeout=120)
    return workspace / "guesses.jsonl"


@pytest.fixture(scope="module")
def ran(workspace, command_line, rows) -> Path:
    output = workspace / "verifiers"
    settings = [
        "rollout.agent=live_verifiers:agent",
        f"rollout.agent_python={PYTHON}",
        "rollout.agent_workers=1",
        "rollout.max_new_tokens=64",
        "model.max_length=512",
        f"data.source={rows}",
        "data.template=chat",
        "trainer.micro_batch_tokens=1024",
        f"trainer.steps={STEPS}",
        f"eval.data={rows}",
        f"eval.every={STEPS}",
        "eval.samples=2",
        f"output_dir={output}",
    ]
    code, said = command_line(workspace, "train", workspace / "config.yaml", *settings)
    assert code == 0, said[-4000:]
    return output


def test_it_trains_on_the_environments_rewards(ran, step_lines):
    rollouts = [r for step in range(1, STEPS + 1) for r in read_rollouts(step_file(ran, step))]
    assert len(rollouts) == 24 * STEPS and {r.status for r in rollouts} == {"ok"}
    for rollout in rollouts:
        asked, first, feedback, second = rollout.episode.messages
        assert asked["content"].startswith("Guess ") and feedback["content"].endswith(" is wrong")
        assert rollout.reward_parts == {"agent": rollout.reward}
        assert rollout.reward == sum(len(m["content"]) % 2 for m in (first, second)) / 2
    rows = step_lines(ran)
    assert all(row["agent/turns"] == 2 and row["agent/segments"] == 1 for row in rows)
    assert any(row["policy/grad_norm"] > 0 for row in rows)


def test_it_evaluates_in_the_environment(ran):
    lines = [json.loads(line) for line in (ran / "evaluations.jsonl").read_text().splitlines()]
    assert lines
