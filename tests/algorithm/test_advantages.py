import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.advantages import (
    batch_normalised,
    group_advantages,
    overlong_penalty,
)

KINDS = ("grpo", "dr_grpo", "rloo")


@pytest.mark.parametrize("kind", KINDS)
def test_vectors(vectors, kind):
    for case in vectors("advantages"):
        got = group_advantages(np.array(case["rewards"]), case["group"], kind, singleton="raw")
        np.testing.assert_allclose(got, case[kind], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero_and_singletons_as_asked(kind):
    rewards, groups = np.array([0.1, 0.1, 0.1, 0.7]), ["a", "a", "a", 1]
    assert (group_advantages(rewards, groups, kind, eps=0.0) == 0).all()
    raw = group_advantages(rewards, groups, kind, singleton="raw")
    assert raw[3] == pytest.approx(0.7, rel=2e-6) and (raw[:3] == 0).all()


def test_an_integer_and_its_text_are_two_groups():
    assert (group_advantages(np.array([0.0, 1.0]), [1, "1"], "rloo") == 0).all()


def test_w_reinforce_weighs_right_answers_by_a_tenth_and_wrong_ones_in_full_whatever_the_group():
    """lambda PSR + NSR with rewards of +1 and -1 (arXiv 2506.01347)."""
    right = np.array([True, False, False, True, True, False])
    got = group_advantages(right.astype(float), ["a", "a", "b", "b", "c", "d"], "reinforce", positive_weight=0.1)
    assert got.tolist() == [0.1, -1.0, -1.0, 0.1, 0.1, -1.0]
    assert group_advantages(np.array([0.5]), [0], "reinforce").tolist() == [0.0]


def test_kind_and_dtype_stay():
    rewards, ids = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([3, 3, 3])
    assert group_advantages(rewards, ids, "grpo").dtype == torch.float32
    assert group_advantages(rewards.double().numpy(), ids.numpy(), "grpo").dtype == np.float64
    assert group_advantages(np.zeros(0), [], "grpo").shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([0.0, np.nan]), ["a", "a"], "grpo"), "rewards: entry 1"),
        ((np.array([0.0, 1.0]), ["a"], "grpo"), "group_ids"),
        ((np.array([0.0, -1.0]), ["a", "a"], "reinforce"), "rewards: entry 1 is -1.0; reinforce takes"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)


def test_normalised_over_the_batch():
    # 1, 2, 6: mean 3, sum of squares 4 + 1 + 9 = 14, variance 7
    got = batch_normalised(np.array([1.0, 2.0, 6.0]))
    np.testing.assert_allclose(got, np.array([-2.0, -1.0, 3.0]) / np.sqrt(7), rtol=1e-7)
    assert batch_normalised(np.full(64, -0.1)).tolist() == [0.0] * 64
    assert batch_normalised(np.array([5.0])).tolist() == [0.0] and len(batch_normalised(np.zeros(0))) == 0


def test_the_overlong_penalty_by_hand():
    """The published L_max 20480 and L_cache 4096 (arXiv 2503.14476, Eq. 13), and a buffer of 1.2 tokens."""
    lengths = np.array([0, 16384, 16385, 18432, 20479, 20480, 30000])
    published = [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 0.2, 1.0), published, rtol=1e-12)
    np.testing.assert_allclose(overlong_penalty(np.array([4, 5, 6]), 6, 0.2, 1.0), [0, -1 / 6, -1], atol=1e-12)
