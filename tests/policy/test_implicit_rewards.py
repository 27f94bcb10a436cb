"""The reward prime on the real model: what transformers computes."""

import numpy as np
import pytest
import torch
from rank_cases import run_cases, settings
from transformers import AutoModelForCausalLM

from dynamo_megatron.types import Rollout, RolloutBatch

BETA, TEMPERATURE = 0.2, 0.7
# group, prompt and response in tokens, reward
ROLLOUTS = [("a", 3, 9, 1.0), ("a", 3, 4, 0.0), ("b", 5, 7, 1.0), ("b", 5, 12, 0.0), ("b", 5, 1, 1.0)]


def rollouts() -> RolloutBatch:
    """Some with rewards of steps besides."""
    rng, made = np.random.default_rng(0), []
    for i, (group, prompt, response, reward) in enumerate(ROLLOUTS):
        tokens, mask = rng.integers(5, 100, prompt + response).tolist(), [0] * prompt + [1] * response
        steps = [(0, 1, 0.5), (1, response, -0.25 * i)] if response > 1 else []
        record = (tokens, mask, [-1.0] * response, [(0, 0, response)], "stop", reward, reward > 0, {})
        made.append(Rollout(f"{group}-{i}", group, group, 1, *record, step_rewards=steps))
    return RolloutBatch.from_rollouts(made)


def on_rank(case, config, layout) -> dict:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch, cut_mini_batches
    from dynamo_megatron.policy.policy import Policy

    policy, batch = Policy(load_model_config(config.model.path), config, layout), rollouts()
    minis = policy.pack(batch, cut_mini_batches(batch.group_ids, 1))
    before = policy.token_stats(batch, minis)
    implicit, reference = policy.implicit_rewards(batch, minis), policy.reference_logprobs(batch, minis)
    after = policy.token_stats(batch, minis)
    assert torch.equal(before.logprobs, after.logprobs), "the policy's weights are not back in their place"
    train = TrainBatch.build(batch, config, layout.gather, implicit_rewards=implicit)
    updates = [policy.update(train, mini, before, reference, 1e-3) for mini in minis]
    return {"implicit": implicit.tolist(), "reference": reference.tolist(), "updates": updates}


@pytest.fixture(scope="module")
def models(make_tiny_model, tmp_path_factory):
    root, names = tmp_path_factory.mktemp("models"), ("policy", "prm", "reference")
    return {name: make_tiny_model(root / name, dtype="float32", seed=seed) for seed, name in enumerate(names)}


def result(models, folder) -> dict:
    """What rank 0 of two pipeline stages found."""
    prime = {"model": str(models["prm"]), "reference": str(models["reference"]), "beta": BETA}
    config = settings(
        models["policy"],
        {"pp": 2},
        rollout={"temperature": TEMPERATURE, "max_new_tokens": 16},
        reward={"functions": ["math", "prime"], "prime": prime},
        algorithm={
            "advantage": {"process": {"gamma": 0.9}},
            "kl": {"coef": 0.1, "reference": str(models["reference"])},
        },
        trainer={"micro_batch_tokens": 16},
    )
    return run_cases(__file__, [{"config": config, "ranks": 2}], folder)[0][0]


def logprobs(folder, temperature: float) -> np.ndarray:
    """float64 [R] by transformers."""
    model, batch, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), rollouts(), []
    for _, start, prompt in zip(batch.prompt_ids, batch.offsets, batch.prompt_lengths, strict=False):
        end = batch.offsets[np.searchsorted(batch.offsets, start) + 1]
        tokens = torch.from_numpy(batch.tokens[start:end])
        with torch.no_grad():
            each = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
        found.append(each[prompt - 1 : -1].gather(1, tokens[prompt:, None])[:, 0].double().numpy())
    return np.concatenate(found)


def test_prime_is_the_scaled_log_ratio_of_its_two_models_at_temperature_1(models, tmp_path):
    one = result(models, tmp_path)
    expected = BETA * (logprobs(models["prm"], 1.0) - logprobs(models["reference"], 1.0))
    np.testing.assert_allclose(one["implicit"], expected, atol=2e-5)
    np.testing.assert_allclose(one["reference"], logprobs(models["reference"], TEMPERATURE), atol=1e-4)
    assert one["updates"][0]["grad_norm"] > 0
