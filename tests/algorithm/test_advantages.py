import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.advantages import (
    batch_normalised,
    entropy_advantages,
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
def test_against_a_loop_over_groups_in_any_order(kind):
    rng = np.random.default_rng(0)
    groups = np.repeat([f"g{i}" for i in range(20)], rng.integers(2, 9, 20))
    groups, rewards = rng.permutation(groups), rng.normal(size=len(groups))
    got = group_advantages(rewards, groups, kind)
    for j, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
        mine = rewards[groups == group]
        others = rewards[(groups == group) & (np.arange(len(groups)) != j)]
        want = {
            "grpo": (reward - mine.mean()) / (mine.std(ddof=1) + 1e-6),
            "dr_grpo": reward - mine.mean(),
            "rloo": reward - others.mean(),
        }[kind]
        assert got[j] == pytest.approx(want, rel=1e-12, abs=1e-14)
    order = rng.permutation(len(groups))
    np.testing.assert_allclose(group_advantages(rewards[order], groups[order], kind), got[order], rtol=1e-12)


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


def test_entropy_advantages_against_a_loop():
    rng = np.random.default_rng(0)
    advantages, entropy = rng.normal(size=300), rng.exponential(2.0, 300)
    advantages[:30] = 0
    want = [a + min(0.4 * h, abs(a) / 2) for a, h in zip(advantages, entropy, strict=True)]
    got = entropy_advantages(advantages, entropy, 0.4, 2.0)
    np.testing.assert_allclose(got, want, rtol=1e-14)
    assert (np.sign(got) == np.sign(advantages)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kind_and_dtype_stay(dtype):
    rewards = torch.tensor([0.0, 1.0, 1.0], dtype=getattr(torch, dtype))
    ids = torch.tensor([3, 3, 3])
    assert group_advantages(rewards, ids, "grpo").dtype == rewards.dtype
    assert group_advantages(rewards.numpy(), ids.numpy(), "grpo").dtype == dtype
    assert group_advantages(np.zeros(0, dtype), [], "grpo").shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.array([0.0]), ["a"], "ppo"), "kind"),
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
    assert batch_normalised(np.array([0.3, 0.3])).tolist() == [0.0, 0.0]
    assert batch_normalised(np.array([5.0])).tolist() == [0.0] and len(batch_normalised(np.zeros(0))) == 0


def test_the_published_sizes():
    """L_max 20480, L_cache 4096 (arXiv 2503.14476, Eq. 13)."""

    def published(length):
        if length <= 16384:
            return 0.0
        return (16384 - length) / 4096 if length <= 20480 else -1.0

    lengths = np.array([0, 1, 16384, 16385, 18432, 20479, 20480, 30000])
    np.testing.assert_allclose(overlong_penalty(lengths, 20480, 0.2, 1.0), [published(n) for n in lengths], rtol=1e-12)


def test_a_short_limit_has_a_buffer_of_a_fraction_of_a_token():
    np.testing.assert_allclose(overlong_penalty(np.array([4, 5, 6]), 6, 0.2, 1.0), [0, -1 / 6, -1], atol=1e-12)
    assert overlong_penalty(np.array([3]), 6, 1.0, 1.0)[0] == pytest.approx(-0.5)
