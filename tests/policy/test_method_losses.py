"""What each file of configs/methods makes of the same rollouts, token by token, against GRPO's and plain arithmetic.
DynaMO's own part is in test_method_modulation.py."""

import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from method_tokens import MAX_LENGTH, METHODS, SIZES, clipped, expect, ratio, run

from dynamo_megatron.algorithm.selection import random_keys
from dynamo_megatron.errors import InputError
from dynamo_megatron.types import RolloutBatch


def test_clip_higher_moves_the_upper_clip_alone(rollouts, stats, grpo):
    got = run("clip_higher", rollouts, stats)
    expect(got, grpo.advantages, grpo.weights, *clipped(grpo.advantages, ratio(stats), high=0.28))
    moved = got.loss != grpo.loss
    assert moved.any() and ((grpo.advantages > 0) & (ratio(stats) > 1.2))[moved].all()


def test_entropy_loss_adds_a_bonus_to_every_token(rollouts, stats, grpo):
    got = run("entropy_loss", rollouts, stats)
    loss, slope = clipped(grpo.advantages, ratio(stats))
    bonus = 0.001 * stats.entropy.double().numpy()
    expect(got, grpo.advantages, grpo.weights, loss - bonus, slope, grad_entropy=-0.001)


def test_fork_tokens_is_dapo_on_the_fifth_of_highest_entropy_divided_by_their_number(rollouts, stats):
    got, dapo = run("fork_tokens", rollouts, stats), run("dapo", rollouts, stats)
    count = math.ceil(0.2 * len(dapo.weights))
    chosen = np.zeros(len(dapo.weights), bool)
    chosen[np.argsort(-stats.entropy.numpy(), kind="stable")[:count]] = True
    assert (got.selected == chosen).all()
    loss = clipped(dapo.advantages, ratio(stats), high=0.28, c=10.0)
    expect(got, dapo.advantages, np.where(chosen, 1 / count, 0.0), *loss)


def test_entropy_advantages_adds_to_the_advantage_alone(rollouts, stats, grpo):
    got = run("entropy_advantages", rollouts, stats)
    entropy = stats.entropy.double().numpy()
    advantages = [a + min(0.4 * h, abs(a) / 2) for a, h in zip(grpo.advantages, entropy, strict=True)]
    assert (np.abs(got.advantages - grpo.advantages)[grpo.advantages != 0] > 0).all()
    expect(got, advantages, grpo.weights, *clipped(advantages, ratio(stats)))


def covariances(grpo, stats):
    logprobs = stats.old.double().numpy()
    return (grpo.advantages - grpo.advantages.mean()) * (logprobs - logprobs.mean())


def test_clip_cov_takes_the_gradient_off_a_few_tokens_of_the_band(rollouts, stats, grpo):
    got, other = (run("clip_cov", rollouts, stats, "algorithm.loss.clip_cov.ratio=0.01", f"seed={s}") for s in (5, 6))
    inside = [i for i, c in enumerate(covariances(grpo, stats)) if 1 < c < 5]
    keys = random_keys(rollouts.rollout_ids, rollouts.response_lengths, seed=5)
    chosen = sorted(inside, key=lambda i: keys[i])[: int(0.01 * len(keys))]
    assert len(inside) > len(chosen) > 3 and set(np.flatnonzero(got.selected)) == set(chosen)
    assert set(np.flatnonzero(other.selected)) != set(chosen)
    advantages = grpo.advantages.copy()
    advantages[chosen] = 0
    expect(got, advantages, grpo.weights, *clipped(advantages, ratio(stats), 1.0, 1.0))
    assert run("clip_cov", rollouts, stats).selected.sum() == 1  # 0.02 % of 900 tokens, at least one


def test_kl_cov_holds_the_largest_covariances_to_the_old_policy_in_place_of_the_clip(rollouts, stats, grpo):
    got = run("kl_cov", rollouts, stats, "algorithm.loss.kl_cov.ratio=0.01")
    order = np.argsort(-covariances(grpo, stats), kind="stable")
    chosen = np.zeros(len(order), bool)
    chosen[order[: int(0.01 * len(order))]] = True
    assert (got.selected == chosen).all() and chosen.sum() > 3
    d = (stats.new - stats.old).double().numpy()
    held, slope = np.sqrt(d**2 + 1e-6) - 1e-3, d / np.sqrt(d**2 + 1e-6)
    r, a = ratio(stats), grpo.advantages
    expect(got, a, grpo.weights, -a * r + chosen * held, -a * r + chosen * slope)


def test_w_reinforce_has_an_advantage_of_its_own_and_an_entropy_bonus(rollouts, stats, grpo):
    got = run("w_reinforce", rollouts, stats)
    advantages = rollouts.per_token(np.where(rollouts.rewards > 0, 0.1, -1.0))
    loss, slope = clipped(advantages, ratio(stats))
    bonus = 0.001 * stats.entropy.double().numpy()
    expect(got, advantages, grpo.weights, loss - bonus, slope, grad_entropy=-0.001)


def test_dapo_is_clip_higher_with_a_penalty_on_long_responses(rollouts, stats, grpo):
    got = run("dapo", rollouts, stats)
    penalties = [0.0 if n <= 32 else (32 - n) / 16 for n in rollouts.response_lengths]
    advantages = np.zeros(len(penalties))
    for group, size in SIZES.items():
        mine = np.array([g == group for g in rollouts.group_ids])
        rewards = (rollouts.rewards + penalties)[mine]
        if size > 1:
            advantages[mine] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    advantages = rollouts.per_token(advantages)
    expect(got, advantages, grpo.weights, *clipped(advantages, ratio(stats), high=0.28, c=10.0))
    assert (advantages[rollouts.per_token(np.array(rollouts.group_ids) == "d")] != 0).any()  # unsolved, but too long


def response_ratio(rollouts, stats, mean: bool) -> np.ndarray:
    """Of each token's response, one response at a time."""
    d, found = (stats.new - stats.old).double().numpy(), []
    for a, b in pairwise(rollouts.response_offsets):
        total = math.fsum(d[a:b])
        found += [math.exp(total / (b - a) if mean else total)] * (b - a)
    return np.array(found)


def test_gspo_has_the_geometric_mean_of_a_response_s_ratios(rollouts, stats, grpo):
    got = run("gspo", rollouts, stats)
    ratios = response_ratio(rollouts, stats, mean=True)
    weights = rollouts.per_token(1 / len(rollouts.rewards) / rollouts.response_lengths)
    loss, slope = clipped(grpo.advantages, ratios, 3e-4, 4e-4)
    expect(got, grpo.advantages, weights, loss, slope)
    moving = rollouts.per_token(np.ones(len(rollouts.rewards))) * (slope != 0)
    assert 0 < moving.sum() < len(slope)
    for a, b in pairwise(rollouts.response_offsets):  # one decision a response
        assert len(set(np.sign(np.abs(got.grad_logprobs[a:b])))) == 1


def test_cispo_bounds_the_weight_and_stops_no_token(rollouts, stats, grpo):
    far = SimpleNamespace(**{**vars(stats), "new": stats.old + 8 * (stats.new - stats.old)})
    got = run("cispo", rollouts, far)
    r, a = ratio(far), grpo.advantages
    assert (r > 5).any() and (r < 0.1).any()
    weight = np.minimum(r, 5.0)
    expect(got, a, grpo.weights, -a * weight * far.new.double().numpy(), -a * weight)
    assert (got.grad_logprobs[a != 0] != 0).all()


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
def test_other_baselines_change_advantage_weights_and_ratio_alone(rollouts, stats, name):
    per_rollout = np.zeros(len(rollouts.rewards))
    for group, size in SIZES.items():
        mine = np.array([g == group for g in rollouts.group_ids])
        rewards = rollouts.rewards[mine]
        if size > 1:
            others = (rewards.sum() - rewards) / (size - 1)
            per_rollout[mine] = rewards - (others if name == "rloo" else rewards.mean())
    weight = 1 / len(per_rollout) / (MAX_LENGTH if name == "dr_grpo" else 1)
    advantages = rollouts.per_token(per_rollout)
    weights = np.full(len(advantages), weight)
    ratios = response_ratio(rollouts, stats, mean=False) if name == "rloo" else ratio(stats)
    expect(run(name, rollouts, stats), advantages, weights, *clipped(advantages, ratios))


def test_otb_has_a_baseline_for_every_token(rollouts, stats):
    got = run("otb", rollouts, stats)
    energy = (1 - 2 * stats.old.double().exp() + stats.collision.double()).numpy()
    bounds, lengths = rollouts.response_offsets, rollouts.response_lengths
    expected = np.zeros(len(energy))
    for s, group in enumerate(rollouts.group_ids):
        for t in range(lengths[s]):
            there = [i for i, g in enumerate(rollouts.group_ids) if g == group and lengths[i] > t]
            so_far = [energy[bounds[i] : bounds[i] + t + 1].sum() for i in there]
            baseline = np.average(rollouts.rewards[there], weights=so_far) if len(there) > 1 else 0.0
            expected[bounds[s] + t] = rollouts.rewards[s] - (rollouts.rewards[s] if SIZES[group] == 1 else baseline)
    weights = np.full(len(energy), 1 / len(energy))
    expect(got, expected, weights, *clipped(expected, ratio(stats)))


def against_history(rollouts, energy_ratio: float = 2) -> np.ndarray:
    """Per rollout: the reward less the optimal baseline of `run`'s prior and ratio."""
    advantages = []
    for group, reward in zip(rollouts.group_ids, rollouts.rewards, strict=True):
        own = [r for g, r in zip(rollouts.group_ids, rollouts.rewards, strict=True) if g == group]
        p = (0.4 * 3 + sum(own) - reward) / (3 + len(own) - 1)
        advantages.append(reward - p / (p + (1 - p) * energy_ratio))
    return np.array(advantages)


def test_spo_normalises_what_history_leaves_over_the_step(rollouts, stats, grpo):
    got = run("spo", rollouts, stats)
    advantages = against_history(rollouts, energy_ratio=1)
    per_token = rollouts.per_token((advantages - advantages.mean()) / advantages.std(ddof=1))
    expect(got, per_token, grpo.weights, *clipped(per_token, ratio(stats), high=0.28, c=10.0))


def test_pilot_is_grpo_with_clip_higher_and_a_dual_clip(rollouts, stats, grpo):
    got = run("pilot", rollouts, stats)
    expect(got, grpo.advantages, grpo.weights, *clipped(grpo.advantages, ratio(stats), high=0.28, c=10.0))


def test_reinforce_ada_compares_with_the_rollouts_that_are_left_out_too(rollouts, stats, grpo):
    """These are what the baseline knows besides the group."""
    got = run("reinforce_ada", rollouts, stats)
    per_token = rollouts.per_token(against_history(rollouts, energy_ratio=1))
    expect(got, per_token, grpo.weights, *clipped(per_token, ratio(stats), high=0.28, c=10.0))


def test_history_is_the_clipped_loss_with_its_own_baseline(rollouts, stats):
    got = run("history", rollouts, stats)
    sizes = np.array([SIZES[group] for group in rollouts.group_ids])
    per_token = rollouts.per_token(against_history(rollouts))
    weights = rollouts.per_token(1 / (len(SIZES) * sizes * MAX_LENGTH))
    expect(got, per_token, weights, *clipped(per_token, ratio(stats)))


@pytest.mark.parametrize(("name", "setting"), [("history", "score_ratio=2"), ("w_reinforce", "kind=reinforce")])
def test_rewards_that_a_method_cannot_take_are_named(rollouts, stats, name, setting):
    overrides = [f"algorithm.advantage.{setting}"]
    with pytest.raises(InputError, match=rf"{setting}(.0)? needs rewards from 0 to 1, and rollout 1/\w/\d+ of prompt"):
        run(name, with_negative_rewards(rollouts), stats, *overrides)


def test_the_first_rewards_outside_0_and_1_leave_the_baseline_of_others_alone(rollouts, stats):
    """`score_ratio: auto`, measured as 2 before (`run`): a rollout's own reward must not choose its baseline."""
    wrong = with_negative_rewards(rollouts)
    baseline = rollouts.rewards - against_history(rollouts)
    expected = wrong.per_token(wrong.rewards - baseline)
    np.testing.assert_allclose(run("history", wrong, stats).advantages, expected, atol=1e-6)


def with_negative_rewards(rollouts):
    """-1 for 0."""
    return RolloutBatch(**{**vars(rollouts), "rewards": 2 * rollouts.rewards - 1})


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rollout_correction_multiplies_the_weights_alone(rollouts, stats, grpo, level):
    d = np.random.default_rng(2).normal(0, 0.4, len(grpo.weights)).astype(np.float32)
    engine = RolloutBatch(**{**vars(rollouts), "engine_logprobs": stats.old.numpy() - d})
    got = run("grpo", engine, stats, f"algorithm.rollout_correction={{level: {level}, high: 1.5}}")
    summed = d.astype(float)
    if level == "sequence":
        summed = np.concatenate([np.full(b - a, summed[a:b].sum()) for a, b in pairwise(rollouts.response_offsets)])
    weights = grpo.weights * np.minimum(np.exp(summed), 1.5)
    expect(got, grpo.advantages, weights, *clipped(grpo.advantages, ratio(stats)))


def test_every_method_is_compared():
    files = (Path(__file__).with_name(f"test_method_{what}.py") for what in ("losses", "modulation"))
    here = "".join(file.read_text() for file in files)
    compared = set(re.findall(r'run\("(\w+)"', here))
    for names in re.findall(r'parametrize\("name", \[(.*)\]\)', here):
        compared |= set(re.findall(r'"(\w+)"', names))
    assert compared == {path.stem for path in METHODS.glob("*.yaml")}
