"""What enters the policy and must not train it: token ids beyond the vocabulary, damaged weights, NaN."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import rollout_batch
from rank_cases import run_cases, settings
from safetensors.torch import load_file, save_file

from dynamo_megatron.types import RolloutBatch

pytestmark = pytest.mark.full

VOCAB = 104  # padded to 128 rows and more
CHANGES = {  # (rollout, position, token id): what is said
    (0, 1, VOCAB): f"rollout g0-0 of prompt 'g0': token id {VOCAB} at position 1, in the prompt, ",
    (0, 7, 10**6): "rollout g0-0 of prompt 'g0': token id 1000000 at position 7, in the response, ",  # a label alone
    (1, 2, -1): "rollout g1-1 of prompt 'g1': token id -1 at position 2, in the response, ",
    (2, 0, VOCAB): f"rollout g2-2 of prompt 'g2': token id {VOCAB} at position 0, in the prompt, ",  # no response
}
DAMAGED = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folders(make_tiny_model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    whole = make_tiny_model(root / "whole", dtype="float32", vocab=VOCAB)
    for name, changed, place, value in (
        ("inf", DAMAGED, (1, -1), float("inf")),  # on the last tensor-parallel rank
        ("nan", DAMAGED, (1, -1), float("nan")),
        ("huge", "model.norm.weight", slice(None), 3e38),  # finite, but what it is multiplied with is not
    ):
        shutil.copytree(whole, root / name)
        tensors = load_file(root / name / "model.safetensors")
        tensors[changed][place] = value
        save_file(tensors, root / name / "model.safetensors", {"format": "pt"})
    return {name: root / name for name in ("whole", "inf", "nan", "huge")}


PROMPTS, RESPONSES = (3, 2, 4), (5, 4, 0)  # tokens
EVERYONE = [np.arange(3)]


def rollouts(change: tuple[int, int, int] | None = None) -> RolloutBatch:
    """`change`: (rollout, position, token id)."""
    batch = rollout_batch(["g0", "g1", "g2"], PROMPTS, RESPONSES, np.zeros(3), tokens=np.arange(5, 23))
    if change is not None:
        batch.tokens[batch.offsets[change[0]] + change[1]] = change[2]
    return batch


def on_rank(case, config, layout) -> dict:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.non_finite import NonFiniteError
    from dynamo_megatron.policy.policy import Policy

    spec = load_model_config(config.model.path)

    def said(call) -> str:
        try:
            return str(call() and "nothing")
        except (ValueError, NonFiniteError) as error:
            return f"{type(error).__name__}: {error}"

    def build(path: str = config.model.path, **algorithm) -> Policy:
        plain = config.model_dump()
        plain["model"]["path"] = path
        for section, change in algorithm.items():
            plain["algorithm"][section] |= change
        return Policy(spec, type(config).model_validate(plain), layout)

    def update_without_weights(policy: Policy) -> dict:
        """Makes a step's update in which all tokens have the weight 0."""
        source = rollouts()
        batch = TrainBatch(source, np.array([1.0, -1.0, 0.0]), EVERYONE, np.zeros(3))
        packed = policy.pack(source, batch.mini_batches)
        stats, reference = policy.token_stats(source, packed), policy.reference_logprobs(source, packed)
        return policy.update(batch, packed[0], stats, reference, 1e-3)

    found = {name: said(lambda path=path: build(path)) for name, path in case["folders"].items()}
    policy = build()
    for change in [None, *CHANGES]:
        batch = rollouts(change)
        found[f"stats {change}"] = said(lambda b=batch: policy.token_stats(b, policy.pack(b, EVERYONE)))
        found[f"fit {change}"] = said(lambda b=batch: policy.fit(b, np.full(3, 0.1), 1e-3))
    batch = rollouts()
    everyone = policy.pack(batch, EVERYONE)
    if layout.rank == layout.world_size - 1:
        policy.chunks[-1].head_weight.data[0, 0] = torch.nan
    found["NaN"] = said(lambda: policy.token_stats(batch, everyone))
    found["kl"] = update_without_weights(build(kl={"coef": 0.1, "reference": config.model.path}))
    found["entropy"] = update_without_weights(build(loss={"entropy_coef": 0.1}))
    policy = build(kl={"coef": 0.1, "reference": case["folders"]["huge"]})
    found["reference NaN"] = said(lambda: policy.reference_logprobs(batch, everyone))
    return found


@pytest.fixture(scope="module")
def said(folders, tmp_path_factory) -> list[dict[str, str]]:
    """What each of two tensor-parallel ranks says, by case."""
    damaged = {name: str(folder) for name, folder in folders.items() if name != "whole"}
    case = {"config": settings(folders["whole"], {"tp": 2}), "ranks": 2, "folders": damaged}
    return run_cases(__file__, [case], tmp_path_factory.mktemp("said"))[0]


@pytest.mark.parametrize("what", ["stats", "fit"])
def test_a_token_id_that_the_model_does_not_have_is_refused_on_every_rank(said, what):
    for rank in said:
        assert rank[f"{what} None"] == "nothing"
        for change, expected in CHANGES.items():
            why = f"InputError: {expected}is not in the model's vocabulary (0 to 103)"
            assert rank[f"{what} {change}"].startswith(why)


def test_a_weight_that_is_not_finite_is_refused_by_name_on_every_rank(said, folders):
    for rank in said:
        for name in ("inf", "nan"):
            why = f"InputError: {folders[name]}: tensor {DAMAGED} holds NaN or infinity"
            assert rank[name].startswith(why)


def test_statistics_that_are_not_finite_end_the_run_on_every_rank(said, folders):
    for rank in said:
        for case, model in (("NaN", "policy"), ("reference NaN", f"algorithm.kl.reference {folders['huge']}")):
            assert rank[case] == (
                f"NonFiniteError: NaN or infinite logprobs or entropy of the {model} in 2 of 3 responses; the first: "
                "rollout g0-0 of prompt 'g0'"
            )


@pytest.mark.parametrize("term", ["kl", "entropy"])
def test_an_update_in_which_no_token_has_a_weight_is_skipped(said, term):
    assert all(rank[term] == {"skipped": 1.0} for rank in said)
