"""The reward prime on the real model: what transformers computes."""

import dataclasses

import numpy as np
import torch
from layout_cases import rollouts, transformers_logprobs
from rank_cases import run_cases, settings
from transformers import AutoModelForCausalLM

from dynamo_megatron.types import RolloutBatch

BETA, TEMPERATURE = 0.2, 0.7


def some_rollouts() -> RolloutBatch:
    """With rewards of steps besides."""
    batch = rollouts(100, 7, None)
    return dataclasses.replace(batch, step_rewards=np.where(batch.response_tokens % 5, np.nan, 0.5))


def on_rank(case, config, layout) -> dict:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch, cut_mini_batches
    from dynamo_megatron.policy.policy import Policy

    policy, batch = Policy(load_model_config(config.model.path), config, layout), some_rollouts()
    minis = policy.pack(batch, cut_mini_batches(batch.group_ids, 1))
    before = policy.token_stats(batch, minis)
    implicit, reference = policy.implicit_rewards(batch, minis), policy.reference_logprobs(batch, minis)
    after = policy.token_stats(batch, minis)
    assert torch.equal(before.logprobs, after.logprobs), "the policy's weights are not back in their place"
    train = TrainBatch.build(batch, config, layout.gather, implicit_rewards=implicit)
    updates = [policy.update(train, mini, before, reference, 1e-3) for mini in minis]
    return {"implicit": implicit.tolist(), "reference": reference.tolist(), "updates": updates}


def result(models, folder) -> dict:
    """What rank 0 of two pipeline stages found."""
    prime = {"model": str(models["prm"]), "reference": str(models["reference"]), "beta": BETA}
    config = settings(
        models["policy"],
        {"pp": 2},
        rollout={"temperature": TEMPERATURE, "max_new_tokens": 32},
        reward={"functions": ["math", "prime"], "prime": prime},
        algorithm={
            "advantage": {"process": {"gamma": 0.9}},
            "kl": {"coef": 0.1, "reference": str(models["reference"])},
        },
        trainer={"micro_batch_tokens": 200},
    )
    return run_cases(__file__, [{"config": config, "ranks": 2}], folder)[0][0]


def test_prime_is_the_scaled_log_ratio_of_its_two_models_at_temperature_1(make_tiny_model, tmp_path):
    names = ("policy", "prm", "reference")
    models = {name: make_tiny_model(tmp_path / name, dtype="float32", seed=seed) for seed, name in enumerate(names)}
    one = result(models, tmp_path)

    @torch.no_grad()
    def logprobs(name: str, temperature: float) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
        return transformers_logprobs(model, some_rollouts(), temperature).double().numpy()

    expected = BETA * (logprobs("prm", 1.0) - logprobs("reference", 1.0))
    np.testing.assert_allclose(one["implicit"], expected, atol=2e-5)
    np.testing.assert_allclose(one["reference"], logprobs("reference", TEMPERATURE), atol=1e-4)
    assert one["updates"][0]["grad_norm"] > 0
