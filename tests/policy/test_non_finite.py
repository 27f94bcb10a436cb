"""The inputs of a failed pass, on disk and back."""

import dataclasses

import numpy as np
import torch

from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.policy.non_finite import PassInputs
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats

LENGTHS = (3, 0, 2)  # tokens of the responses


def rollouts() -> RolloutBatch:
    tokens = sum(LENGTHS)
    return RolloutBatch(
        prompt_ids=["p", "p", "q"],
        tokens=np.arange(3 + tokens),
        offsets=np.array([0, 4, 5, 8]),
        prompt_lengths=np.array([1, 1, 1]),
        rollout_ids=["a", "b", "c"],
        group_ids=["g", "g", "h"],
        engine_logprobs=np.linspace(-1, -2, tokens).astype(np.float32),
        rewards=np.array([0.0, 1.0, 0.5]),
        successes=np.array([False, True, False]),
        weight_versions=np.zeros(tokens, np.int32),
        finish_reasons=["stop", "length", "stop"],
        servers=["s", "s", ""],
    )


def update(**changes) -> PassInputs:
    of_tokens = torch.linspace(0, 1, sum(LENGTHS))
    batch = TrainBatch(
        rollouts(), np.array([0.5, -0.5, 1.0]), [np.array([0, 2]), np.array([1])], weights=np.array([0.1, 0.2, 0.3])
    )
    of_batch = {name: changes.pop(name) for name in ("advantages", "weights") if name in changes}
    given = {
        "batch": dataclasses.replace(batch, **of_batch),
        "stats": TokenStats(of_tokens, of_tokens + 1, of_tokens + 2, of_tokens + 3),
        "reference_logprobs": of_tokens - 1,
        "learning_rate": 1e-5,
        **changes,
    }
    return PassInputs(rollouts(), [np.array([0, 2])], given, "update")


def test_it_comes_back_from_disk_as_it_was(tmp_path):
    update(advantages=np.array([0.5, np.nan, 1.0])).save(tmp_path / "update.pt")
    again = PassInputs.load(tmp_path / "update.pt")
    assert repr(again) == repr(update(advantages=np.array([0.5, np.nan, 1.0])))
    assert again.given["batch"].rollouts.engine_logprobs.dtype == np.float32
    sequences = Sequences(["p", "q"], np.arange(6), np.array([0, 3, 6]), np.array([1, 1]))
    fit = PassInputs(sequences, [np.arange(2)], {"weights": np.array([0.25, 0.25]), "learning_rate": 1e-3}, "fit")
    fit.save(tmp_path / "fit.pt")
    assert repr(PassInputs.load(tmp_path / "fit.pt")) == repr(fit)
