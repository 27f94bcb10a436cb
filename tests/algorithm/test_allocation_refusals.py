"""Observations and states that an allocator refuses, by the prompt's name."""

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator


def knowing(*prompt_ids):
    """An allocator that has seen one right and three wrong rollouts of each prompt."""
    allocator = RolloutAllocator({})
    right = np.tile([True, False, False, False], len(prompt_ids))
    allocator.observe(np.repeat(prompt_ids, 4).tolist(), right.astype(float), right, 1)
    return allocator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["x", "bad"], [0.0, np.nan], [False, False], 3), "'bad'.*nan"),
        ((["bad", "bad"], [1e200, -1e200], [False, False], 3), "'bad'"),
        ((["x", "bad"], [0.0, 1.0], [0, 2], 3), "'bad'.*2"),
        ((["x"], [0.0, 1.0], [True, True], 3), "prompt_ids"),
        ((["x", "bad"], [0.0, 1.0], [0, 1], 3, [1.0, -1.0]), "energy: prompt 'bad' has -1.0"),
        ((["x", "bad"], [0.0, 1.0], [0, 1], 3, None, [2, -1]), "lengths: prompt 'bad' has -1.0"),
    ],
)
def test_bad_observations_name_the_prompt_and_change_nothing(arguments, message):
    allocator = RolloutAllocator({})
    with pytest.raises(ValueError, match=message):
        allocator.observe(*arguments)
    assert allocator.state_dict() == RolloutAllocator({}).state_dict()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("trials", 0),
            ("trials", np.nan),
            ("successes", 5),
            ("successes", -1),
            ("reward_squares", -1),
            ("energy_wrong", -1.0),
        ),
        *(("energy_right_trials", 2.0), ("energy_wrong_trials", 5.0), ("token_trials", 5.0), ("tokens", -1.0)),
    ],
)
def test_a_contradictory_state_names_the_prompt_and_changes_nothing(name, value):
    allocator, other = knowing("fine", "bad"), knowing("known")
    before, state = other.state_dict(), allocator.state_dict()
    state[name][state["prompt_ids"].index("bad")] = value
    with pytest.raises(ValueError, match=f"'bad'.*{name}"):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    "change",
    [
        *({"trials": x} for x in ([2], 2, None, ["a", "b"], np.ones((2, 1)))),
        *({"prompt_ids": x} for x in (["a", "a"], ["a", 1], "ab", None)),
    ],
)
def test_a_state_that_does_not_fit_together_is_refused(change):
    allocator = knowing("a", "b")
    with pytest.raises(ValueError, match="state"):
        allocator.load_state_dict({**allocator.state_dict(), **change})
    with pytest.raises(ValueError, match="state: no "):
        allocator.load_state_dict({"epoch": 1})
