"""Rules that look at a step's outcomes, on records whose outcomes leave nothing to chance."""

import numpy as np
import pytest
from recorded import recorded_step

from dynamo_megatron.replay.rounds import one_round, rounds


def steps(*rates: float, size: int = 16) -> tuple[list, np.ndarray]:
    """Two steps with `size` rollouts of each prompt."""
    ids = [f"p{i}" for i in range(len(rates))]
    rewards = [[1.0] * round(size * p) + [0.0] * round(size * (1 - p)) for p in rates]
    return [recorded_step(s, ids, [size] * len(ids), rewards) for s in (1, 2)], np.tile(rates, 2)


def test_prompts_that_are_always_or_never_solved_get_no_second_round():
    """pilot: 8 rollouts of each of 3 prompts, and nothing more; reinforce_ada: 32, or 8 if one right one is enough."""
    found = rounds(*steps(0.0, 1.0, 1.0))
    assert found["pilot"] == {"rollouts": 2 * 24, "trained": 2 * 24, "groups": 0}
    assert found["reinforce_ada"] == {"rollouts": 2 * 96, "trained": 2 * 12, "groups": 0}
    assert found["reinforce_ada, positive"] == {"rollouts": 2 * (32 + 8 + 8), "trained": 2 * 12, "groups": 0}


def test_the_budget_of_the_others_goes_to_the_middling_one():
    """p = 1/2: it passes but for 9 + 37 outcomes of 256, and then has 32 rollouts, the most, of 48."""
    record, rates = steps(0.5, 0.0, 1.0)
    found = rounds(record * 100, np.tile(rates, 100))["pilot"]
    passes = 1 - (1 + 1 + 8) / 256  # not 0, 7 or 8 right of 8
    steps_ = 200
    assert found["groups"] == pytest.approx(
        passes * steps_ + 8 / 256 * steps_, abs=3.0
    )  # 7 of 8 differ, untrained others
    assert found["rollouts"] == pytest.approx(steps_ * (24 + 24 * passes), rel=0.01)
    assert found["trained"] == pytest.approx(steps_ * (32 * passes + 24 * (1 - passes)), rel=0.01)


def test_what_was_decided_before_is_expected_and_all_trained_on():
    found = one_round(np.array([0.5, 1.0]), np.array([3, 5]))
    assert found == {"rollouts": 8.0, "trained": 8.0, "groups": 0.75}
