"""Process rewards: hand-computed cases, and what holds for any rollouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.algorithm.advantages import group_advantages, process_advantages
from dynamo_megatron.config.method import AdvantageConfig

NAN = np.nan
# Three rollouts of group 0 (of 4, 3 and 2 tokens) and one of group 1 (3 tokens).
LENGTHS, GROUP = np.array([4, 3, 2, 3]), np.array([0, 0, 0, 1])
REWARDS = np.array([NAN, 1.0, NAN, 3.0, *(NAN, NAN, 5.0), *(NAN, NAN), *(NAN, 2.0, 4.0)])


def config(kind: str = "rloo", **more) -> AdvantageConfig:
    process = {name: more.pop(name) for name in ("weight", "gamma") if name in more}
    return AdvantageConfig(kind=kind, process=process, **more)


def test_leave_one_out_by_hand():
    """The mean steps of the rollouts of group 0 are 2, 5 and none; so the first one's baseline is 5, the second's 2."""
    found = process_advantages(REWARDS, GROUP, LENGTHS, config(gamma=0.5))
    first = [(1 - 5) / 2 + (3 - 5) / 8, (1 - 5) + (3 - 5) / 4, (3 - 5) / 2, 3 - 5]
    np.testing.assert_allclose(found, [*first, *(3 / 4, 3 / 2, 3), *(0, 0), *(0, 0, 0)], atol=1e-15)
    doubled = process_advantages(REWARDS, GROUP, LENGTHS, config(gamma=0.5, weight=2.0))
    np.testing.assert_array_equal(doubled, 2 * found)
    raw = process_advantages(REWARDS, GROUP, LENGTHS, config(singleton="raw"))
    np.testing.assert_array_equal(raw[-3:], [6.0, 6.0, 4.0])


def test_grpo_by_hand():
    """All steps of the group: 1, 3 and 5, of mean 3 and standard deviation 2 (ddof 1)."""
    found = process_advantages(REWARDS, GROUP, LENGTHS, config("grpo", eps=0.0))
    np.testing.assert_allclose(found, [-1, -1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0], atol=1e-15)
    found = process_advantages(REWARDS, GROUP, LENGTHS, config("dr_grpo"))
    np.testing.assert_allclose(found, [-2, -2, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0], atol=1e-15)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.floats(-5, 5, width=32)), min_size=1, max_size=12),
    st.sampled_from(["rloo", "grpo", "dr_grpo"]),
)
def test_one_step_that_is_the_response_is_an_outcome(rollouts, kind):
    """At gamma 1: each token of it has the advantage that the outcome's reward of that size gives."""
    ids = [g for g, _, _ in rollouts]
    group = np.array([sorted(set(ids)).index(g) for g in ids])
    lengths, rewards = (np.array([row[i] for row in rollouts]) for i in (1, 2))
    at_the_end = np.full(lengths.sum(), NAN)
    at_the_end[np.cumsum(lengths) - 1] = rewards
    found = process_advantages(at_the_end, group, lengths, config(kind))
    outcome = group_advantages(rewards.astype(float), group.tolist(), kind)
    np.testing.assert_allclose(found, np.repeat(outcome, lengths), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["rloo", "grpo", "dr_grpo", "history", "otb", "reinforce", "mine:advantages"])
def test_equal_steps_of_a_group_change_nothing(kind):
    rewards = np.array([0.1, NAN, 0.1, 0.1, NAN, 0.1])
    assert not process_advantages(rewards, np.array([0, 0, 0]), np.array([2, 3, 1]), config(kind)).any()
