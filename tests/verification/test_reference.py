"""The reference and the trainer, which share no code, agree on every shipped method that the reference covers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.losses import policy_loss_terms
from dynamo_megatron.algorithm.modulation import entropy_change, modulate
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.config.files import compose
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, TokenStats
from dynamo_megatron.verification.checks import _checks
from dynamo_megatron.verification.record import StepRecord
from dynamo_megatron.verification.reference import Statistics, learning_rate, not_covered, token_losses

METHODS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "methods").glob("*.yaml"))
LEFT_OUT = {"clip_cov", "distill", "dynamo_published", "fork_tokens", "kl_cov", "otb", "pilot", "ppo", "r1"}
LEFT_OUT |= {"reinforce_ada"}
CHANGES = {
    "raw": ["algorithm.advantage={kind: dr_grpo, singleton: raw}", "algorithm.loss.aggregation=prompt_token_mean"],
    "lengths": ["algorithm.loss.aggregation=sequence_mean", "algorithm.advantage={kind: rloo, positive_weight: 0.3}"],
}


def config(method: str, *keys: str):
    given = ["model.path=m", "data.source=d", "output_dir=o", "data.batch_prompts=512", "rollout.max_new_tokens=12"]
    given += ["algorithm.teacher.path=t"] if method == "distill" else []
    return compose([f"methods/{method}"], [*given, *keys])[0]


@pytest.fixture(scope="module")
def seen():
    """Rollouts in groups of 1 to 7, one of equal rewards, one response empty; statistics of their tokens."""
    rng = np.random.default_rng(3)
    group_ids = [f"g{g}" for g, n in enumerate((1, 2, 7, 4, 3)) for _ in range(n)]
    lengths = rng.integers(1, 13, len(group_ids))
    lengths[4] = 0
    rewards = np.where(np.array(group_ids) == "g3", 1.0, rng.random(len(group_ids)).round(1))
    tokens, zeros = int((lengths + 1).sum()), np.zeros(int(lengths.sum()), np.float32)
    batch = RolloutBatch(
        prompt_ids=group_ids,
        tokens=np.zeros(tokens, np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths + 1)]),
        prompt_lengths=np.ones(len(lengths), np.int64),
        rollout_ids=[f"{g}-{i}" for i, g in enumerate(group_ids)],
        group_ids=group_ids,
        engine_logprobs=zeros,
        rewards=rewards,
        successes=rewards > 0.5,
        weight_versions=np.zeros(len(zeros), np.int32),
        finish_reasons=["stop"] * len(lengths),
        servers=[""] * len(lengths),
    )
    logits = torch.from_numpy(rng.normal(0, 2, (len(zeros), 30))).log_softmax(-1)
    p, entropy = logits.exp(), -(logits.exp() * logits).sum(-1)
    expected = (p**2 * (logits + entropy[:, None])).sum(-1)
    return batch, TokenStats(*(s.float() for s in (logits[:, 0], entropy, expected, (p**2).sum(-1))))


def by_the_trainer(batch, stats, given, history):
    """(loss, its slopes by logprob and entropy) of each token, float64 [R]."""
    built, loss = TrainBatch.build(batch, given, baseline=history), given.policy_loss()
    members = np.arange(len(batch.rewards))
    shaped = shape_tokens(batch, members, built.advantages, built.weights, stats, given.algorithm, seed=0)
    advantages, m = shaped.advantages.double(), loss.modulation
    logprobs, entropy = (x.clone().requires_grad_() for x in stats[:2])
    if m is not None:
        fields = (advantages, stats.logprobs, stats.entropy, stats.logprobs, torch.ones_like(advantages))
        change = entropy_change(*fields, 0.2, 0.2, expected_pi_lambda=stats.expected_pi_lambda)
        scales = {name: getattr(m, name) for name in ("alpha", "lambda_min", "gamma", "tau")}
        advantages = modulate(advantages, stats.entropy, change, shaped.ranges, **scales).advantages
    terms = policy_loss_terms(logprobs, entropy, stats.logprobs, advantages, None, loss)
    total = shaped.weights.double() * terms.loss
    slopes = torch.autograd.grad(total.sum(), (logprobs, entropy), allow_unused=True)
    return [total.detach(), *(torch.zeros_like(total) if s is None else s for s in slopes)]


@pytest.mark.parametrize("name", [*METHODS, *CHANGES])
def test_loss_and_slopes_are_the_trainers(seen, name):
    batch, stats = seen
    given = config("dynamo" if name in CHANGES else name, *CHANGES.get(name, []))
    if name in LEFT_OUT:
        assert not_covered(given) is not None
        return
    assert not_covered(given) is None
    history, each = None, np.ones(len(batch.rewards))
    if given.algorithm.needs_baseline:
        ratio = 1.7 if (asked := given.algorithm.advantage.score_ratio) == "auto" else asked
        history = Baseline(0.4 * each, 3 * each, score_ratio=ratio, variance=0.2)
    found = token_losses(batch, given, Statistics(*(s.double().numpy() for s in stats[:3])), history)
    assert np.abs(found.slope).max() > 0
    for ours, theirs in zip(found, by_the_trainer(batch, stats, given, history), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-7)


def test_what_is_not_covered(tmp_path):
    """Rollouts of earlier rounds that are not trained on, what the baselines of later rounds were made with, adapters,
    and experts."""
    assert not_covered(config("dynamo", "algorithm.dynamic_sampling={}")) == "algorithm.dynamic_sampling"
    assert not_covered(config("grpo", "algorithm.dynamic_sampling={}")) is None
    sampled = SimpleNamespace(step_rewards=None, response_offsets=[0, 100])
    for method in ("reinforce_ada", "pilot"):
        record = StepRecord(Path("run"), 1, config(method), SimpleNamespace(num_experts=8), {}, sampled)
        first = next(_checks(record))
        assert (first.what, first.found) == ("response tokens", "")
    assert not_covered(config("grpo", "model.lora={}")) == "model.lora"
    record = StepRecord(tmp_path, 3, config("grpo"), SimpleNamespace(num_experts=8), {}, None)
    assert record.saved(3) == "the reference does not cover a mixture of experts"


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_is_the_trainers(schedule, warmup):
    keys = [f"optimizer={{schedule: {schedule}, warmup_steps: {warmup}}}", "critic.warmup_steps=3", "trainer.steps=40"]
    given = config("ppo", *keys)
    for step in range(41):
        assert learning_rate(given, step) == pytest.approx(given.learning_rate(step), rel=1e-12, abs=1e-18)
