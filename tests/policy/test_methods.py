"""What methods compute of each token, against plain arithmetic: the rest is in test_peers.py and tests/verification."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layout_cases import rollout_batch

from dynamo_megatron.algorithm.selection import random_keys
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.config.files import compose
from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels.reference import loss_terms, summed_loss
from dynamo_megatron.kernels.types import Statistics, Tokens
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, TokenStats

MAX_LENGTH = 40
SIZES = {"a": 2, "b": 7, "c": 15, "d": 8, "e": 1, "f": 12}


@pytest.fixture(scope="module")
def rollouts() -> RolloutBatch:
    """Groups of 1 to 15 rollouts of 1 to 40 tokens, rewards of 0 and 1, one group unsolved."""
    rng = np.random.default_rng(0)
    groups = [group for group, size in SIZES.items() for _ in range(size)]
    lengths = rng.integers(1, MAX_LENGTH + 1, len(groups))
    lengths[::6] = MAX_LENGTH
    rewards = [float(rng.random() < 0.5 and group != "d") for group in groups]
    return rollout_batch(groups, np.full(len(groups), 3), lengths, rewards)


@pytest.fixture(scope="module")
def stats(rollouts) -> SimpleNamespace:
    """Of the old policy and of one an update later, float32 [R]."""
    rng, count = np.random.default_rng(1), len(rollouts.engine_logprobs)
    old = -rng.exponential(1.5, count)
    columns = {
        "old": old,
        "new": old + rng.normal(0, 0.2, count),
        "entropy": rng.exponential(0.8, count),
        "expected": rng.normal(0, 0.1, count),
        "collision": np.exp(2 * old) + 0.3 * (1 - np.exp(old)) ** 2,
    }
    return SimpleNamespace(**{name: torch.tensor(x, dtype=torch.float32) for name, x in columns.items()})


def run(name: str, rollouts: RolloutBatch, stats: SimpleNamespace, *overrides: str) -> SimpleNamespace:
    """Per token, float64 numpy [R]: advantages and weights as they enter the head, the loss and its derivatives."""
    fixed = ["model.path=m", "data.source=d", "output_dir=o", f"rollout.max_new_tokens={MAX_LENGTH}"]
    if name == "dynamo_published":
        fixed += ["data.batch_prompts=32", "algorithm.allocation.budget=512", "algorithm.loss.mini_batches=1"]
    config = compose([f"methods/{name}"], [*fixed, *overrides])[0]
    each = np.ones(len(rollouts.rewards))
    known = Baseline(0.4 * each, 3 * each, score_ratio=2.0)
    batch, nothing = TrainBatch.build(rollouts, config, baseline=known), torch.zeros_like(stats.new)
    (members,) = batch.mini_batches
    old = TokenStats(stats.old, stats.entropy, stats.expected, stats.collision)
    shaped = shape_tokens(rollouts, members, batch.advantages, batch.weights, old, config.algorithm, seed=config.seed)
    new = Statistics(nothing, nothing, stats.new, stats.entropy, stats.expected, nothing)
    tokens = Tokens(shaped.advantages, shaped.weights, stats.old, None, shaped.old_kl_coef, None)
    terms = loss_terms(config.policy_loss(), new, tokens, stats.expected, shaped.ranges)
    loss, *_ = summed_loss(config.policy_loss(), stats.new, stats.entropy, tokens, stats.expected, shaped.ranges)
    fields = {
        "advantages": shaped.advantages,
        "weights": shaped.weights,
        "modulated": terms.advantages,
        "loss": loss,
        "grad_logprobs": terms.grad_logprobs,
        "grad_entropy": terms.grad_entropy,
    }
    return SimpleNamespace(
        **{key: value.double().numpy() for key, value in fields.items()},
        selected=shaped.selected.numpy(),
        ranges=shaped.ranges,
    )


def ratio(stats):
    return np.exp((stats.new - stats.old).double().numpy())


def clipped(advantages, ratio, low=0.2, high=0.2, c=math.inf):
    """PPO's loss with the dual clip and its derivative by the logprob, by cases."""
    loss, slope = [], []
    for a, r in zip(advantages, ratio, strict=True):
        stopped = (a > 0 and r > 1 + high) or (a < 0 and (r < 1 - low or r > c))
        bound = 1 + high if a > 0 else min(max(r, 1 - low), c)
        loss.append(-a * (bound if stopped else r))
        slope.append(0.0 if stopped else -a * r)
    return np.array(loss), np.array(slope)


def expect(got, advantages, weights, loss, slope):
    np.testing.assert_allclose(got.advantages, advantages, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(got.loss, loss, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got.grad_logprobs, weights * slope, rtol=2e-5, atol=1e-9)
    assert not got.grad_entropy.any()


@pytest.fixture(scope="module")
def grpo(rollouts, stats) -> SimpleNamespace:
    return run("grpo", rollouts, stats)


def test_fork_tokens_is_dapo_on_the_fifth_of_highest_entropy_divided_by_their_number(rollouts, stats):
    got, dapo = run("fork_tokens", rollouts, stats), run("dapo", rollouts, stats)
    count = math.ceil(0.2 * len(dapo.weights))
    chosen = np.zeros(len(dapo.weights), bool)
    chosen[np.argsort(-stats.entropy.numpy(), kind="stable")[:count]] = True
    assert (got.selected == chosen).all()
    loss = clipped(dapo.advantages, ratio(stats), high=0.28, c=10.0)
    expect(got, dapo.advantages, np.where(chosen, 1 / count, 0.0), *loss)


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


@pytest.mark.parametrize("correction", ["null", "{high: 1.5}"])
def test_otb_has_a_baseline_for_every_token(rollouts, stats, correction):
    got = run("otb", rollouts, stats, f"algorithm.rollout_correction={correction}")
    energy = (1 - 2 * stats.old.double().exp() + stats.collision.double()).numpy()
    correct = np.minimum(np.exp(stats.old.double().numpy() - rollouts.engine_logprobs), 1.5)
    correct = np.ones(len(energy)) if correction == "null" else correct
    energy = energy * correct**2  # that of the weighted score
    bounds, lengths = rollouts.response_offsets, rollouts.response_lengths
    expected = np.zeros(len(energy))
    for s, group in enumerate(rollouts.group_ids):
        for t in range(lengths[s]):
            there = [i for i, g in enumerate(rollouts.group_ids) if g == group and lengths[i] > t]
            so_far = [energy[bounds[i] : bounds[i] + t + 1].sum() for i in there]
            baseline = np.average(rollouts.rewards[there], weights=so_far) if len(there) > 1 else 0.0
            expected[bounds[s] + t] = rollouts.rewards[s] - (rollouts.rewards[s] if SIZES[group] == 1 else baseline)
    expect(got, expected, correct / len(energy), *clipped(expected, ratio(stats)))


def against_history(rollouts) -> np.ndarray:
    """Per rollout: the reward less the optimal baseline of `run`'s prior and ratio."""
    advantages = []
    for group, reward in zip(rollouts.group_ids, rollouts.rewards, strict=True):
        own = [r for g, r in zip(rollouts.group_ids, rollouts.rewards, strict=True) if g == group]
        p = (0.4 * 3 + sum(own) - reward) / (3 + len(own) - 1)
        advantages.append(reward - p / (p + (1 - p) * 2))
    return np.array(advantages)


def history_parts(rollouts) -> tuple[np.ndarray, np.ndarray]:
    """(advantages, weights) per token."""
    sizes = np.array([SIZES[group] for group in rollouts.group_ids])
    weights = rollouts.per_token(1 / (len(SIZES) * sizes * MAX_LENGTH))
    return rollouts.per_token(against_history(rollouts)), weights


@pytest.mark.parametrize(("name", "setting"), [("history", "score_ratio=2"), ("w_reinforce", "kind=reinforce")])
def test_rewards_that_a_method_cannot_take_are_named(rollouts, stats, name, setting):
    overrides = [f"algorithm.advantage.{setting}"]
    with pytest.raises(InputError, match=rf"{setting}(.0)? needs rewards from 0 to 1, and rollout \w-\d+ of prompt"):
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


# -- DynaMO's modulation
def modulation(advantages, stats, *, alpha=0.2, lambda_min=0.6, expected=None, low=0.2, high=0.2):
    """beta_stab beta_comp by the formulas, ranges at the old policy, factors at the new one."""
    entropy = stats.entropy.double().numpy()

    def change(logprobs):
        r = np.exp(logprobs - stats.old.double().numpy())
        moves = ((advantages > 0) & (r <= 1 + high)) | ((advantages < 0) & (r >= 1 - low))
        return np.abs(moves * r * advantages * (np.exp(logprobs) * (logprobs + entropy) - expected))

    largest = change(stats.old.double().numpy()).max()
    x = np.clip(change(stats.new.double().numpy()) / (largest + 1e-8), 0, 1)
    stab = lambda_min + (1 - lambda_min) / (1 + np.exp(50 * (x - 0.99)))
    comp = 1 + alpha * (entropy.max() - entropy) / (entropy.max() - entropy.min() + 1e-8)
    return stab, np.where(advantages > 0, comp, 1.0)


# The ablations of docs/methods.md: override -> which of (stabilisation, compensation) is left.
ABLATIONS = {
    "": (True, True),
    "algorithm.modulation=null": (False, False),
    "algorithm.modulation.lambda_min=1": (False, True),
    "algorithm.modulation.alpha=0": (True, False),
}


@pytest.mark.parametrize("override", ABLATIONS)
def test_dynamo_and_its_ablations(rollouts, stats, override):
    got = run("dynamo", rollouts, stats, *([override] if override else []))
    advantages, weights = history_parts(rollouts)
    stab, comp = modulation(advantages, stats, expected=stats.expected.double().numpy())
    stabilises, compensates = ABLATIONS[override]
    modulated = advantages * (stab if stabilises else 1) * (comp if compensates else 1)
    assert (stab < 0.9).any() and (comp > 1.1).any()
    np.testing.assert_allclose(got.modulated, modulated, rtol=2e-5, atol=1e-7)
    expect(got, advantages, weights, *clipped(modulated, ratio(stats)))


def test_the_ranges_of_sequence_mean(rollouts, stats):
    pi_lambda = (stats.old.exp() * (stats.old + stats.entropy)).double().numpy()
    means = np.concatenate([np.full(b - a, pi_lambda[a:b].mean()) for a, b in pairwise(rollouts.response_offsets)])
    advantages, _ = history_parts(rollouts)
    ranges = run("dynamo", rollouts, stats, "algorithm.modulation.expectation=sequence_mean").ranges
    largest = np.abs(advantages * (pi_lambda - means)).max()
    assert float(ranges.entropy_change_max) == pytest.approx(largest, rel=1e-5)
    changes = np.abs(advantages * (pi_lambda - stats.expected.double().numpy()))
    assert float(run("dynamo", rollouts, stats).ranges.entropy_change_max) == pytest.approx(changes.max(), rel=1e-5)


def test_dynamo_published_is_grpo_with_modulation_clip_higher_and_a_dual_clip(rollouts, stats, grpo):
    """One micro-batch that holds everything, where its scope is the mini-batch's but for the ranges' policy."""
    fixed = SimpleNamespace(**{**vars(stats), "old": stats.new})  # ratio 1: both policies are the same
    got = run("dynamo_published", rollouts, fixed)
    stab, comp = modulation(grpo.advantages, fixed, expected=stats.expected.double().numpy(), high=0.28)
    modulated = grpo.advantages * stab * comp
    np.testing.assert_allclose(got.modulated, modulated, rtol=2e-5, atol=1e-7)
    expect(got, grpo.advantages, grpo.weights, -modulated, -modulated)
