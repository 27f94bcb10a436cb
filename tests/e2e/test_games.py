"""Runs whose agent plays the game of configs/treasure: real ranks, a real SGLang server, a model that knows nothing."""

import json
import runpy
from pathlib import Path

import pytest

from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
GAME = runpy.run_path(str(ROOT / "configs" / "treasure" / "agent.py"))
STEPS, BUDGET = 2, 32


@pytest.fixture(scope="module")
def ran(workspace, command_line) -> Path:
    output, pairs = workspace / "treasure-run", [("a1", "c3"), ("f6", "d5"), ("b4", "e4"), ("c2", "a5")]
    rows = [
        {"id": f"{a}-{b}", "problem": f"{a} {b}", "answer": None, "options": {"start": a, "treasure": b}}
        for a, b in pairs
    ]
    (workspace / "treasure.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workspace / "treasure_agent.py").write_text((ROOT / "configs" / "treasure" / "agent.py").read_text())
    settings = [
        f"data.source={workspace / 'treasure.jsonl'}",
        "data.template=chat",
        "data.batch_prompts=4",
        "model.max_length=1024",
        "rollout.agent=treasure_agent:agent",
        "rollout.agent_turns=8",
        f"algorithm.allocation.budget={BUDGET}",
        f"trainer.steps={STEPS}",
        "trainer.micro_batch_tokens=1024",
        f"output_dir={output}",
    ]
    code, said = command_line(workspace, "train", workspace / "config.yaml", *settings)
    assert code == 0, said[-4000:]
    return output


def test_games_are_played_by_the_rules(ran, step_lines):
    rollouts = [r for step in range(1, STEPS + 1) for r in read_rollouts(step_file(ran, step))]
    assert len(rollouts) == STEPS * BUDGET and {r.status for r in rollouts} == {"ok"}
    for rollout in rollouts:
        start, treasure = rollout.prompt_id.split("-")
        game, won = GAME["Treasure"](), 0.0
        game.reset(options={"start": start, "treasure": treasure})
        messages = rollout.episode.messages
        assert messages[0]["content"] == f"{start} {treasure}"
        for answer, told in zip(messages[1::2], messages[2::2], strict=False):
            text, reward, _, _, _ = game.step(answer["content"].strip())
            assert told["content"] == text
            won += reward
        won += game.step(messages[-1]["content"].strip())[1]
        assert rollout.reward == won
    assert all(row["agent/turns"] > 3 for row in step_lines(ran))
