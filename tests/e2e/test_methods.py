"""Methods of configs/methods/ whose loops differ train from one recording; tests/policy has the losses of all."""

import dataclasses
import math

import pytest
from background_run import step_lines

KEYS = {  # of the method, for a small batch
    "dynamo": (),
    "dapo": (),
    "spo": (),
    "pilot": (
        "data.batch_prompts=3",
        "algorithm.allocation={budget: 24, rollout_n_max: 12}",
        "algorithm.sequential.round_n=4",
    ),
    "reinforce_ada": (),
}


@pytest.mark.full
@pytest.mark.parametrize("method", KEYS)
def test_it_trains(replay, method):
    def scored(rollout):
        """Of five problems one is always right, and one never: both steps have one of them, and others."""
        fixed = {"problem-0": 1.0, "problem-2": 0.0}
        reward = fixed.get(rollout.prompt_id, rollout.reward)
        return dataclasses.replace(rollout, reward=reward, success=reward == 1.0)

    keys = (f"methods/{method}", "algorithm.loss.mini_batches=2", *KEYS[method])
    code, text, output = replay(f"method-{method}", scored, *keys)
    assert code == 0, text[-3000:]
    rows = step_lines(output)
    first = 1 if method == "spo" else 0  # of a single rollout in the first step nothing is known to compare it with
    assert len(rows) == 2 and all((row["policy/grad_norm"] > 0) == (i >= first) for i, row in enumerate(rows))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    if method == "dapo":
        assert all(row["rollout/refill_rounds"] > 0 for row in rows)
    if method in ("pilot", "reinforce_ada"):
        assert all(row["sequential/rounds"] > 1 and row["sequential/trained_share"] < 1 for row in rows)
