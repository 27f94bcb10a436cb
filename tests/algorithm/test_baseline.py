"""The part of a baseline that is known before the rollouts: shrunk to the pool, and how surely."""

import json

import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.success import Baseline


def observed(*visits: tuple[str, list[float]], half_life=1e9) -> RolloutAllocator:
    """An allocator that has seen the rewards of one prompt after another, a step each."""
    allocator = RolloutAllocator({"half_life": half_life})
    for step, (prompt, rewards) in enumerate(visits, 1):
        allocator.observe([prompt] * len(rewards), rewards, [r == 1 for r in rewards], step)
    return allocator


def test_nothing_is_known_before_the_first_step():
    mean, strength = observed().baseline(["a", "b"])
    assert mean.tolist() == strength.tolist() == [0, 0] and mean.dtype == strength.dtype == np.float64


def test_by_hand():
    """a: 3 of 4 right, b: 0 of 2. The pool's mean weighs them by t / (t + 1): (4/5 3/4) / (4/5 + 2/3)."""
    allocator = observed(("a", [1, 1, 1, 0]), ("b", [0, 0]))
    pool = (0.8 * 0.75) / (0.8 + 2 / 3)
    mean, strength = allocator.baseline(["b", "new", "a", "b"])
    np.testing.assert_allclose(mean, [pool / 3, pool, (3 + pool) / 5, pool / 3], rtol=1e-12)
    np.testing.assert_allclose(strength, [3, 1, 5, 3], rtol=1e-12)


def test_no_prompt_is_given_up_nor_held_for_solved():
    assert observed(("a", [0] * 8)).baseline(["new"])[0] == pytest.approx(0.02)
    assert observed(("a", [1] * 8)).baseline(["new"])[0] == pytest.approx(0.98)


def test_a_long_history_counts_as_16_rollouts():
    allocator = observed(("a", [1, 0] * 40))
    mean, strength = allocator.baseline(["a"])
    assert strength == 16 and mean == pytest.approx(0.5)


def test_rewards_that_are_not_0_or_1_by_hand():
    """Two prompts with rewards 0.1, 0.3 and 0.6, 0.8: variance within .02, between .125 - .02 / 2 = .115."""
    allocator = observed(("a", [0.1, 0.3]), ("b", [0.6, 0.8]))
    known = allocator.reward_baseline(["a", "new"])
    c = max(0.02 / 0.115, 0.25)  # the least that a pool counts as
    assert known.variance == pytest.approx(0.02)
    np.testing.assert_allclose(known.strength, [c + 2, c])
    np.testing.assert_allclose(known.mean, [(c * 0.45 + 2 * 0.2) / (c + 2), 0.45])


def test_the_fit_finds_the_ratio_of_variances():
    """Rewards with variance 1 within and 0.5 between prompts: 2 rollouts' worth."""
    rng = np.random.default_rng(0)
    allocator = observed(*((f"p{i}", (rng.normal(0, 0.5**0.5) + rng.normal(0, 1, 4)).tolist()) for i in range(2000)))
    assert allocator.baseline(["new"])[1] == pytest.approx(2, rel=0.15)


def test_the_state_survives_json():
    allocator = observed(("a", [1, 1, 1, 0]), ("b", [0, 0]))
    allocator.observe(["a", "b"], [1, 0], [True, False], 3, energy=[1.0, 3.0])
    again = RolloutAllocator({"half_life": 1e9})
    again.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
    before, after = (x.reward_baseline(["a", "b", "c"], score_ratio=None) for x in (allocator, again))
    assert before.mean.tolist() == after.mean.tolist() and before.score_ratio == after.score_ratio > 1
    allocator.observe(["a"], [-1], [False], 4, energy=[1.0])
    allocator.observe(["a"], [1], [True], 5, energy=[1.0])
    again.load_state_dict(json.loads(json.dumps(allocator.state_dict())))
    assert [x.reward_baseline(["a"], score_ratio=None).score_ratio for x in (allocator, again)] == [1, 1]


def test_rounds_are_joined_in_order():
    a, b = (Baseline(np.array(m), np.array(s), 2.0) for m, s in (([0.1], [1.0]), ([0.2, 0.3], [2.0, 3.0])))
    joined = Baseline.join([a, b]).of(np.array([2, 0]))
    assert joined.mean.tolist() == [0.3, 0.1] and joined.strength.tolist() == [3, 1] and joined.score_ratio == 2
