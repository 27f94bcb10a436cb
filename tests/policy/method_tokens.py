"""Made-up rollouts, and what a file of configs/methods makes of them token by token."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from dynamo_megatron.algorithm.baseline import Baseline
from dynamo_megatron.algorithm.losses import response_log_ratios
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.config.files import compose
from dynamo_megatron.kernels.reference import loss_terms, summed_loss
from dynamo_megatron.kernels.types import Statistics, Tokens
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, TokenStats

METHODS = Path(__file__).parents[2] / "configs" / "methods"
MAX_LENGTH = 40
SIZES = {"a": 2, "b": 7, "c": 15, "d": 8, "e": 1, "f": 12}


def make_rollouts() -> RolloutBatch:
    """Groups of 1 to 15 rollouts of 1 to 40 tokens, rewards of 0 and 1, one group unsolved."""
    rng = np.random.default_rng(0)
    names = [(f"1/{group}/{i}", group) for group, size in SIZES.items() for i in range(size)]
    lengths = rng.integers(1, MAX_LENGTH + 1, len(names))
    lengths[::6] = MAX_LENGTH
    rewards = np.array([float(rng.random() < 0.5 and group != "d") for _, group in names])
    return RolloutBatch(
        prompt_ids=[group for _, group in names],
        tokens=np.zeros(int((lengths + 3).sum()), np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths + 3)]),
        prompt_lengths=np.full(len(names), 3),
        rollout_ids=[name for name, _ in names],
        group_ids=[group for _, group in names],
        engine_logprobs=np.zeros(int(lengths.sum()), np.float32),
        rewards=rewards,
        successes=rewards > 0,
        weight_versions=np.zeros(int(lengths.sum()), np.int32),
        finish_reasons=["stop"] * len(names),
        servers=[""] * len(names),
    )


def make_stats(rollouts: RolloutBatch) -> SimpleNamespace:
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
    config = compose([str(METHODS / f"{name}.yaml")], [*fixed, *overrides])[0]
    each = np.ones(len(rollouts.rewards))
    batch = TrainBatch.build(rollouts, config, baseline=Baseline(0.4 * each, 3 * each, score_ratio=2.0))
    (members,) = batch.mini_batches
    shaped = shape_tokens(
        rollouts,
        members,
        batch.advantages,
        batch.weights,
        TokenStats(stats.old, stats.entropy, stats.expected, stats.collision),
        config.algorithm,
        seed=config.seed,
    )
    nothing = torch.zeros_like(stats.new)
    log_ratios = None
    if (kind := config.algorithm.loss.ratio) != "token":
        log_ratios = response_log_ratios(stats.new - stats.old, torch.from_numpy(rollouts.response_lengths), kind)
    tokens = Tokens(shaped.advantages, shaped.weights, stats.old, None, shaped.old_kl_coef, log_ratios)
    terms = loss_terms(
        config.policy_loss(),
        Statistics(nothing, nothing, stats.new, stats.entropy, stats.expected, nothing),
        tokens,
        stats.expected,
        shaped.ranges,
    )
    loss = summed_loss(config.policy_loss(), stats.new, stats.entropy, tokens, stats.expected, shaped.ranges).loss
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


def expect(got, advantages, weights, loss, slope, grad_entropy=0.0):
    np.testing.assert_allclose(got.advantages, advantages, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(got.loss, loss, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got.grad_logprobs, weights * slope, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(got.grad_entropy, grad_entropy * np.asarray(weights), rtol=1e-5)


def run_grpo(rollouts: RolloutBatch, stats: SimpleNamespace) -> SimpleNamespace:
    """`run` of grpo, held to plain arithmetic: what the other methods are compared with."""
    got = run("grpo", rollouts, stats)
    per_rollout = np.zeros(len(rollouts.rewards))
    for group, size in SIZES.items():
        mine = np.array([g == group for g in rollouts.group_ids])
        rewards = rollouts.rewards[mine]
        if size > 1:
            per_rollout[mine] = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    advantages, tokens = rollouts.per_token(per_rollout), len(rollouts.engine_logprobs)
    loss, slope = clipped(advantages, ratio(stats))
    expect(got, advantages, np.full(tokens, 1 / tokens), loss, slope)
    return got
