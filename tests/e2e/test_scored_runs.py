"""Live runs whose rewards come from elsewhere: a judge that is wrong and down in turn; a reward model."""

import asyncio
import zlib

import numpy as np
import pytest
from scoring_endpoint import Endpoint, completion

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.store import read_lines, step_file
from dynamo_megatron.types import REWARD_STATES

pytestmark = pytest.mark.full

TURNS = ("scored", "wrong_format", "crashed")  # what half of the responses of a step come to
JUDGED_STEPS, MODEL_STEPS = 6, 3
OWN = "own_reward:contains"


def states(row: dict, function: str) -> dict[str, int]:
    return {state: round(24 * row[f"reward/{function}/{state}"]) for state in REWARD_STATES}


def test_a_run_trains_through_a_judge_that_is_wrong_and_down_in_turn(workspace, start_run, step_lines, tmp_path):
    output = tmp_path / "run"

    async def answer(request, _number):
        asked = request["messages"][0]["content"].encode()
        done = len(step_lines(output))
        turn = TURNS[done % 3] if zlib.crc32(asked) % 2 else "scored"
        if turn == "wrong_format":
            return completion("I would rather not say.")
        if turn == "crashed":
            return (503, b"") if done < 3 else None
        return completion(f"Score: {zlib.crc32(asked) % 11}")

    with Endpoint(answer) as endpoint:
        run = start_run(
            workspace,
            workspace / "config.yaml",
            f"output_dir={output}",
            f"trainer.steps={JUDGED_STEPS}",
            f"reward.functions=[{OWN}, judge]",
            "reward.on_error=zero",
            f"reward.judge.url={endpoint.url}",
            "reward.judge.model=m",
            "reward.judge.api_key_env=JUDGE_KEY",
            environment={"JUDGE_KEY": "hunter22"},
        )
        assert run.wait() == 0, run.text[-3000:]
    rows = step_lines(output)
    assert [row["step"] for row in rows] == list(range(1, JUDGED_STEPS + 1))
    assert all(np.isfinite(row["policy/loss"]) for row in rows) and any(row["policy/grad_norm"] > 0 for row in rows)
    for row in rows:
        turn = TURNS[(row["step"] - 1) % 3]
        counted = states(row, "judge")
        assert sum(counted.values()) == 24 and all(n == 0 for s, n in counted.items() if s not in (turn, "scored"))
        assert counted["scored"] == 24 if turn == "scored" else 0 < counted[turn] < 24
        assert states(row, OWN)["scored"] == 24
        assert round(24 * row["reward/errors"]) == (0 if turn == "scored" else counted[turn])
        rollouts = list(read_lines(step_file(output, row["step"])))
        assert sum(r.reward_failures == {"judge": turn} for r in rollouts) == 24 - counted["scored"]
        for r in rollouts:
            assert r.reward == (0.0 if r.reward_failures else r.reward_parts[OWN] + r.reward_parts["judge"])
    assert set(endpoint.keys) == {"Bearer hunter22"}
    files = [file for file in output.rglob("*") if file.is_file()]
    assert not [file for file in (run.log, *files) if b"hunter22" in file.read_bytes()]
    assert "rollouts have reward 0 for a reward_error, of prompt" in run.text


class Classifier(SGLangServer):
    def _command(self, on_cpu):
        return ["--is-embedding" if word == "--enable-fp32-lm-head" else word for word in super()._command(on_cpu)]

    async def _warm_up(self, client, timeout):
        """It does not generate."""


def test_a_run_trains_on_the_scores_of_a_reward_model(
    workspace, start_run, step_lines, tiny_reward_model, transformers_score, tmp_path
):
    output = tmp_path / "run"
    model = ModelConfig(path=str(tiny_reward_model), dtype="float32")
    server = Classifier(RolloutConfig(start_timeout=400), model, tmp_path / "server.log")
    server.start()
    try:
        asyncio.run(server.wait_ready())
        run = start_run(
            workspace,
            workspace / "config.yaml",
            f"output_dir={output}",
            f"trainer.steps={MODEL_STEPS}",
            "reward.functions=[reward_model]",
            "reward.success_threshold=0",
            "reward.deadline=60",
            f"reward.reward_model.path={tiny_reward_model}",
            f"reward.reward_model.urls=[{server.endpoint.url}]",
            "reward.reward_model.api_key_env=MODEL_KEY",
            environment={"MODEL_KEY": server.endpoint.api_key},
        )
        assert run.wait() == 0, run.text[-3000:]
    finally:
        server.stop()
    rows = step_lines(output)
    assert [row["step"] for row in rows] == list(range(1, MODEL_STEPS + 1))
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert states(row, "reward_model") == {"scored": 24, "wrong_format": 0, "timed_out": 0, "crashed": 0}
        rollouts = list(read_lines(step_file(output, row["step"])))
        assert row["reward/reward_model/mean"] == pytest.approx(np.mean([r.reward for r in rollouts]))
        for r in rollouts[::6]:
            problem = r.prompt.removesuffix("\n")
            assert r.reward == pytest.approx(transformers_score(problem, r.response), rel=1e-3, abs=1e-3), r.rollout_id
    assert run.left_behind() == []
