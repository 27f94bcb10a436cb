"""A live run whose rewards come from elsewhere: a judge that is wrong and down in turn, and a reward model."""

import asyncio
import zlib

import numpy as np
import pytest
from background_run import step_lines
from scoring_endpoint import Endpoint, completion

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.store import read_lines, step_file
from dynamo_megatron.types import REWARD_STATES

TURNS = ("scored", "wrong_format", "crashed")  # what half of the judgements of a step come to
STEPS = 6
OWN = "own_reward:contains"


class Classifier(SGLangServer):
    def _command(self, on_cpu):
        return ["--is-embedding" if word == "--enable-fp32-lm-head" else word for word in super()._command(on_cpu)]

    async def _warm_up(self, client, timeout):
        """It does not generate."""


@pytest.fixture
def classifier(tiny_reward_model, tmp_path):
    model = ModelConfig(path=str(tiny_reward_model), dtype="float32")
    server = Classifier(RolloutConfig(start_timeout=400), model, tmp_path / "server.log")
    server.start()
    try:
        asyncio.run(server.wait_ready())
        yield server.endpoint
    finally:
        server.stop()


@pytest.mark.full
def test_a_run_trains_on_the_scores_of_a_reward_model_and_of_a_judge_that_is_down_in_turn(
    workspace, start_run, classifier, tiny_reward_model, transformers_score, tmp_path
):
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

    keys = [f"output_dir={output}", f"trainer.steps={STEPS}", f"reward.functions=[{OWN}, judge, reward_model]"]
    keys += ["reward.on_error=zero", "reward.judge.model=m", "reward.judge.api_key_env=JUDGE_KEY", "reward.deadline=20"]
    keys += [f"reward.reward_model.path={tiny_reward_model}", f"reward.reward_model.urls=[{classifier.url}]"]
    keys += ["reward.reward_model.api_key_env=MODEL_KEY"]
    environment = {"JUDGE_KEY": "hunter22", "MODEL_KEY": classifier.api_key}
    with Endpoint(answer) as endpoint:
        keys += [f"reward.judge.url={endpoint.url}"]
        run = start_run(workspace, workspace / "config.yaml", *keys, environment=environment)
        assert run.wait() == 0, run.text[-3000:]
    rows = step_lines(output)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(np.isfinite(row["policy/loss"]) for row in rows) and any(row["policy/grad_norm"] > 0 for row in rows)
    for row in rows:
        turn = TURNS[(row["step"] - 1) % 3]
        counted = {state: round(24 * row[f"reward/judge/{state}"]) for state in REWARD_STATES}
        assert sum(counted.values()) == 24 and all(n == 0 for s, n in counted.items() if s not in (turn, "scored"))
        assert counted["scored"] == 24 if turn == "scored" else 0 < counted[turn] < 24
        assert row[f"reward/{OWN}/scored"] == row["reward/reward_model/scored"] == 1
        assert round(24 * row["reward/errors"]) == (0 if turn == "scored" else counted[turn])
        rollouts = list(read_lines(step_file(output, row["step"])))
        assert sum(r.reward_failures == {"judge": turn} for r in rollouts) == 24 - counted["scored"]
        for r in rollouts:
            assert r.reward == pytest.approx(0.0 if r.reward_failures else sum(r.reward_parts.values()))
        for r in [r for r in rollouts if not r.reward_failures][::4]:
            assert r.reward_parts.keys() == {OWN, "judge", "reward_model"}
            expected = transformers_score(r.prompt.removesuffix("\n"), r.response)
            assert r.reward_parts["reward_model"] == pytest.approx(expected, rel=1e-3, abs=1e-3), r.rollout_id
    assert set(endpoint.keys) == {"Bearer hunter22"}
    files = [file for file in output.rglob("*") if file.is_file()]
    assert not [file for file in (run.log, *files) if b"hunter22" in file.read_bytes()]
    assert "rollouts have reward 0 for a reward_error, of prompt" in run.text
    assert run.left_behind() == []
