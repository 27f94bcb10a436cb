"""A run whose episodes are a verifiers environment's: real ranks, a real SGLang server, verifiers' interpreter."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from background_run import json_lines, step_lines

from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
TASKSET = Path(__file__).parents[1] / "agents" / "guess_taskset.py"
ENVIRONMENT = {"taskset": {"id": "guess_taskset"}}
AGENT = f"from dynamo_megatron.agents.verifiers import verifiers_agent\nagent = verifiers_agent({ENVIRONMENT})\n"
STEPS, SAMPLES = 3, 2


def test_it_trains_and_evaluates_in_the_environment(workspace, command_line, verifiers_python):
    rows, output = workspace / "guesses.jsonl", workspace / "verifiers"
    shutil.copy(TASKSET, workspace)
    (workspace / "live_verifiers.py").write_text(AGENT)
    words = ["-m", "dynamo_megatron.agents.verifiers", json.dumps(ENVIRONMENT), rows.name]
    subprocess.run([verifiers_python, *words], cwd=workspace, check=True, timeout=120)
    settings = ["rollout.agent=live_verifiers:agent", f"rollout.agent_python={verifiers_python}", "data.template=chat"]
    settings += ["rollout.agent_workers=1", "rollout.max_new_tokens=64", "model.max_length=512", f"data.source={rows}"]
    settings += ["trainer.micro_batch_tokens=1024", f"trainer.steps={STEPS}", f"output_dir={output}"]
    settings += [f"eval.data={rows}", f"eval.every={STEPS}", f"eval.samples={SAMPLES}"]
    code, said = command_line(workspace, "train", workspace / "config.yaml", *settings)
    assert code == 0, said[-4000:]
    rollouts = [r for step in range(1, STEPS + 1) for r in read_rollouts(step_file(output, step))]
    assert len(rollouts) == 24 * STEPS and {r.status for r in rollouts} == {"ok"}
    for rollout in rollouts:
        asked, first, told, second = rollout.episode.messages
        number = asked["content"].removeprefix("Guess ").removesuffix(".")
        assert told["content"] == f"It is not {number}."
        assert rollout.reward == sum(len(m["content"]) % 2 for m in (first, second)) / 2
        assert rollout.reward_parts == {"agent": rollout.reward}
    rows = step_lines(output)
    assert all(row["agent/turns"] == 2 and row["agent/segments"] == 1 for row in rows)
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    rows = json_lines(output / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [0, STEPS]
    for row in rows:
        assert row["eval/samples"] == 6 * SAMPLES and row["eval/failed"] == 0.0
        halves = row["eval/reward"] * 6 * SAMPLES * 2  # each answer's is 0 or a half
        assert halves == pytest.approx(round(halves))
