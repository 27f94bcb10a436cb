"""DynaMO's modulation, its ablations and its published variant, by the formulas on made-up rollouts."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from method_tokens import MAX_LENGTH, METHODS, SIZES, clipped, expect, ratio, run


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


def dynamo_parts(rollouts):
    per_rollout, weights = np.zeros(len(rollouts.rewards)), np.zeros(len(rollouts.rewards))
    for group, size in SIZES.items():
        mine = np.array([g == group for g in rollouts.group_ids])
        rewards = rollouts.rewards[mine]
        weights[mine] = 1 / len(SIZES) / size / MAX_LENGTH
        p = (0.4 * 3 + rewards.sum() - rewards) / (3 + size - 1)  # `run`: 3 earlier rollouts, of mean reward .4
        per_rollout[mine] = rewards - p / (p + 2 * (1 - p))  # and wrong ones of twice the energy
    return rollouts.per_token(per_rollout), rollouts.per_token(weights)


# The ablations of docs/methods.md: override -> which of (stabilisation, compensation) is left.
ABLATIONS = {
    "": (True, True),
    "algorithm.allocation.kind=uniform": (True, True),
    "algorithm.modulation=null": (False, False),
    "algorithm.modulation.lambda_min=1": (False, True),
    "algorithm.modulation.alpha=0": (True, False),
}


@pytest.mark.parametrize("override", ABLATIONS)
def test_dynamo_and_its_ablations(rollouts, stats, override):
    got = run("dynamo", rollouts, stats, *([override] if override else []))
    advantages, weights = dynamo_parts(rollouts)
    stab, comp = modulation(advantages, stats, expected=stats.expected.double().numpy())
    stabilises, compensates = ABLATIONS[override]
    modulated = advantages * (stab if stabilises else 1) * (comp if compensates else 1)
    assert (stab < 0.9).any() and (comp > 1.1).any()
    np.testing.assert_allclose(got.modulated, modulated, rtol=2e-5, atol=1e-7)
    expect(got, advantages, weights, *clipped(modulated, ratio(stats)))


def test_a_function_for_the_tokens_advantages_can_be_the_modulation(rollouts, stats, monkeypatch):
    """In the first update of a step; benchmarks/modulation_controls.py has it, of alpha 1."""
    monkeypatch.chdir(METHODS.parents[1])
    fixed = SimpleNamespace(**{**vars(stats), "new": stats.old})
    function = "algorithm.advantage.entropy_shaping=benchmarks.modulation_controls:modulated"
    ours, built_in, base = (
        run("history", rollouts, fixed, override)
        for override in (function, "algorithm.modulation={alpha: 1.0}", "algorithm.modulation=null")
    )
    assert ours.ranges is None and not np.allclose(built_in.modulated, base.modulated, rtol=0.01)
    np.testing.assert_allclose(ours.advantages, built_in.modulated, rtol=1e-6)
    np.testing.assert_allclose(ours.grad_logprobs, built_in.grad_logprobs, rtol=1e-6)


def test_the_ranges_of_sequence_mean_and_quantile(rollouts, stats):
    pi_lambda = (stats.old.exp() * (stats.old + stats.entropy)).double().numpy()
    means = np.concatenate([np.full(b - a, pi_lambda[a:b].mean()) for a, b in pairwise(rollouts.response_offsets)])
    advantages, _ = dynamo_parts(rollouts)
    ranges = run("dynamo", rollouts, stats, "algorithm.modulation.expectation=sequence_mean").ranges
    largest = np.abs(advantages * (pi_lambda - means)).max()
    assert float(ranges.entropy_change_max) == pytest.approx(largest, rel=1e-5)
    changes = np.abs(advantages * (pi_lambda - stats.expected.double().numpy()))
    changes = sorted(changes[advantages != 0])
    ranges = run("dynamo", rollouts, stats, "algorithm.modulation={stabiliser: quantile, quantile: 0.9}").ranges
    assert float(ranges.entropy_change_max) == pytest.approx(changes[math.ceil(0.9 * len(changes)) - 1], rel=1e-5)
    assert float(run("dynamo", rollouts, stats).ranges.entropy_change_max) == pytest.approx(changes[-1], rel=1e-5)


def test_dynamo_published_is_grpo_with_modulation_clip_higher_and_a_dual_clip(rollouts, stats, grpo):
    """One micro-batch that holds everything, where its scope is the mini-batch's but for the ranges' policy."""
    fixed = SimpleNamespace(**{**vars(stats), "old": stats.new})  # ratio 1: both policies are the same
    got = run("dynamo_published", rollouts, fixed)
    stab, comp = modulation(grpo.advantages, fixed, expected=stats.expected.double().numpy(), high=0.28)
    modulated = grpo.advantages * stab * comp
    np.testing.assert_allclose(got.modulated, modulated, rtol=2e-5, atol=1e-7)
    expect(got, grpo.advantages, grpo.weights, -modulated, -modulated)
