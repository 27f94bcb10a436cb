"""The inputs of a failed pass, on disk and back, and which of them are named as not finite."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamo_megatron.models import load_model_config
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.policy.non_finite import PassInputs, broken_weights
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats

LENGTHS = (3, 0, 2)  # tokens of the responses
BROKEN = "NaN, infinity or values above 1.8e+19 in the weights"


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
    batch = TrainBatch(rollouts(), np.array([0.5, -0.5, 1.0]), np.array([0, 1, 0]), weights=np.array([0.1, 0.2, 0.3]))
    of_batch = {name: changes.pop(name) for name in ("advantages", "weights") if name in changes}
    given = {
        "batch": dataclasses.replace(batch, **of_batch),
        "stats": TokenStats(of_tokens, of_tokens + 1, of_tokens + 2, of_tokens + 3),
        "reference_logprobs": of_tokens - 1,
        "learning_rate": 1e-5,
        **changes,
    }
    return PassInputs("update", rollouts(), [np.array([0, 2])], given)


def test_it_comes_back_from_disk_as_it_was(tmp_path):
    update(advantages=np.array([0.5, np.nan, 1.0])).save(tmp_path / "update.pt")
    again = PassInputs.load(tmp_path / "update.pt")
    assert repr(again) == repr(update(advantages=np.array([0.5, np.nan, 1.0])))
    assert again.given["batch"].rollouts.engine_logprobs.dtype == np.float32
    sequences = Sequences(["p", "q"], np.arange(6), np.array([0, 3, 6]), np.array([1, 1]))
    fit = PassInputs("fit", sequences, [np.arange(2)], {"weights": np.array([0.25, 0.25]), "learning_rate": 1e-3})
    fit.save(tmp_path / "fit.pt")
    assert repr(PassInputs.load(tmp_path / "fit.pt")) == repr(fit)


def test_what_is_not_finite_is_named():
    """Also beside a response without tokens."""
    assert update().faults() == []
    logprobs = rollouts().engine_logprobs
    logprobs[3] = np.nan
    broken = update(advantages=np.array([np.nan, 0, np.inf]), weights=np.array([np.inf, 0, 1]))
    broken = dataclasses.replace(broken, sequences=dataclasses.replace(rollouts(), engine_logprobs=logprobs))
    assert broken.faults() == [
        "the advantage of rollout a of prompt 'p' is NaN or infinite, and of 1 more",
        "the token weight of rollout a of prompt 'p' is NaN or infinite",
        "the engine logprob of rollout c of prompt 'q' is NaN or infinite",
    ]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, -1e30])
def test_the_first_of_the_weights_that_broke_is_named(tiny_model, value):
    """Ranks 1 and 2 have them, and this one is rank 1."""
    bad = torch.tensor([1.0, value], dtype=torch.bfloat16)
    weights = [("decoder.final_layernorm.weight", bad), ("output_layer.weight", bad)]
    chunk = SimpleNamespace(
        layer_offset=0, named_parameters=lambda: [("embedding.word_embeddings.weight", bad[:0]), *weights]
    )
    one, spec = SimpleNamespace(rank=lambda: 0, size=lambda: 1), load_model_config(str(tiny_model))
    layout = SimpleNamespace(ep=one, gather=lambda mine: ["", mine, mine])
    assert broken_weights([chunk], spec, layout) == f"{BROKEN} of rank 1: model.norm.weight"
    weights[:] = [("output_layer.weight", torch.tensor([1.0, -1e15]))]
    assert broken_weights([chunk], spec, layout) is None
