import dataclasses

import numpy as np
import torch
from background_run import made_rollout

from dynamo_megatron.algorithm.modulation import entropy_change, modulate, modulation_ranges
from dynamo_megatron.config import Config
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.tracking.token_rows import read_token_rows, token_rows, write_token_rows
from dynamo_megatron.types import RolloutBatch, TokenStats

GROUPS, SIZE = 3, 4


def made(**algorithm) -> tuple[TrainBatch, TokenStats, Config]:
    """A batch of 12 rollouts of 1 to 12 tokens with random statistics."""
    loss = {"mini_batches": 1} | algorithm.pop("loss", {})
    config = Config(
        model={"path": "m"},
        data={"source": "d"},
        output_dir="o",
        kernels={"gradient": "recompute"},  # which scope micro_batch asks for
        algorithm={"advantage": {"kind": "rloo"}, "loss": loss, **algorithm},
    )
    generator, rollouts = np.random.default_rng(0), []
    for s in range(GROUPS * SIZE):
        group, response = s // SIZE, list(range(10 * s, 11 * s + 1))
        fields = {"reward": float(generator.random()), "right": False, "engine_logprobs": [-1.0] * len(response)}
        rollouts.append(made_rollout(1, group, s % SIZE, f"p{group}", [1], response, **fields))
    batch = RolloutBatch.from_rollouts(rollouts)
    tokens = len(batch.engine_logprobs)
    logprobs, entropy = -torch.from_numpy(generator.random((2, tokens)).astype(np.float32)) * 3
    collision = torch.from_numpy(generator.random(tokens).astype(np.float32))
    expected = torch.from_numpy(generator.random(tokens).astype(np.float32))
    return TrainBatch.build(batch, config), TokenStats(logprobs, -entropy, expected, collision), config


MODULATION = {"alpha": 0.4, "lambda_min": 0.6, "gamma": 50.0, "tau": 0.5}


def test_the_factor_is_that_of_the_whole_mini_batch():
    batch, stats, config = made(modulation={**MODULATION, "expectation": "exact"})
    rows = list(token_rows(batch, stats, config, 5))
    loss, advantages = config.algorithm.loss, torch.from_numpy(batch.rollouts.per_token(batch.advantages)).float()
    ones = torch.ones_like(advantages)
    clip = (loss.clip_ratio_low, loss.clip_ratio_high)
    change = entropy_change(
        advantages, stats.logprobs, stats.entropy, stats.logprobs, ones, *clip, stats.expected_pi_lambda
    )
    ranges = modulation_ranges(stats.entropy, change, ones)
    whole = modulate(advantages, stats.entropy, change, ranges, **MODULATION)
    factor = (whole.beta_comp * whole.beta_stab).numpy()
    assert factor.min() < 0.9 and factor.max() > 1.1
    assert len(rows) == 5
    for row in rows:
        s = batch.rollouts.rollout_ids.index(row["rollout_id"])
        here = slice(*batch.rollouts.response_offsets[s : s + 2])
        np.testing.assert_allclose(row["modulation"], factor[here], rtol=1e-4)
        np.testing.assert_allclose(row["entropy"], stats.entropy[here], rtol=1e-4)
        np.testing.assert_allclose(row["logprob"], stats.logprobs[here], rtol=1e-4)
        np.testing.assert_allclose(row["advantage"], [batch.advantages[s]] * (s + 1), rtol=1e-4)


def test_the_lowest_and_the_highest_advantage_are_among_them():
    batch, stats, config = made(loss={"mini_batches": 3}, modulation=None)
    batch = dataclasses.replace(batch, advantages=np.roll(batch.advantages, 5))
    ends = {batch.rollouts.rollout_ids[s] for s in (batch.advantages.argmin(), batch.advantages.argmax())}
    assert ends == {row["rollout_id"] for row in token_rows(batch, stats, config, 2)}
    assert len(list(token_rows(batch, stats, config, 100))) == GROUPS * SIZE
    by_token = dataclasses.replace(batch, advantages=0 * batch.advantages)  # of a critic: all are in `process`
    by_token = dataclasses.replace(by_token, process=batch.rollouts.per_token(batch.advantages))
    assert ends == {row["rollout_id"] for row in token_rows(by_token, stats, config, 2)}


def test_rewards_of_steps_are_in_the_advantage():
    batch, stats, config = made(modulation=None)
    process = np.linspace(-1, 1, len(stats.logprobs))
    for row in token_rows(dataclasses.replace(batch, process=process), stats, config, 100):
        s = batch.rollouts.rollout_ids.index(row["rollout_id"])
        here = slice(*batch.rollouts.response_offsets[s : s + 2])
        np.testing.assert_allclose(row["advantage"], batch.advantages[s] + process[here], rtol=1e-4, atol=1e-6)


def test_what_is_written_is_read_and_replaced(tmp_path):
    path = tokens_file(tmp_path, 7)
    assert read_token_rows(path) == {}
    rows = [{"rollout_id": "a", "entropy": [0.5, 1e-9]}, {"rollout_id": "b"}]
    write_token_rows(path, [{"rollout_id": "old", "entropy": [1.0]}])
    write_token_rows(path, rows)
    assert read_token_rows(path) == {"a": {"entropy": [0.5, 1e-9]}, "b": {}}
