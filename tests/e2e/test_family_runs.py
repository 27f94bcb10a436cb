"""Three live steps of every family, with a real SGLang server: the policy's logprobs are the server's."""

import pytest
from background_run import step_lines

from dynamo_megatron.models import FAMILIES

pytestmark = pytest.mark.full


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps(family, workspace, model_of, command_line, tmp_path):
    # SGLang ignores Mistral's window: the run's max_length, 256, is within it.
    model = model_of(family, fields={"sliding_window": 256} if family == "mistral" else {})
    # An untrained model earns it in half of its responses: no step is without a gradient.
    reward = "def odd(prompt, response):\n    return sum(map(ord, response)) % 2 * 1.0\n"
    (tmp_path / "odd_reward.py").write_text(reward)
    keys = ("parallel.pp=1", "parallel.tp=2", "trainer.steps=3", "checkpoint.export_hf=never")
    keys += (f"model.path={model}", "reward.functions=[odd_reward:odd]", f"output_dir={tmp_path / 'output'}")
    code, text = command_line(tmp_path, "train", workspace / "config.yaml", *keys)
    assert code == 0, text[-3000:]
    rows = step_lines(tmp_path / "output")
    print(family, "largest gap", max(row["rollout/logprob_gap_max"] for row in rows))
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 1e-4 and row["policy/grad_norm"] > 0, row
        assert row["rollout/weight_version_min"] == row["step"] - 1
        assert row["rollout/failed"] == row["rollout/aborted"] == row["rollout/rejected"] == 0, row
