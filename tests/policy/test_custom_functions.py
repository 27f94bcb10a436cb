"""A loss of the user's makes the update of the built-in one that it repeats; a wrong one is named."""

import numpy as np
import pytest
import torch
from layout_cases import rollouts, weights_of
from rank_cases import run_cases, settings

pytestmark = pytest.mark.full


# -- functions of a user, right ones and wrong ones
def grpo(inputs):
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * ratio.clamp(0.8, 1.2))


def grpo_with_kl(inputs):
    less = inputs.reference_logprobs - inputs.logprobs
    return grpo(inputs) + inputs.kl_coef * (less.exp() - less - 1)


def nan(inputs):
    return grpo(inputs) * torch.where(inputs.response == 1, torch.nan, 1.0)


def nan_gradient(inputs):
    return (inputs.logprobs - inputs.old_logprobs).abs().sqrt()


LAYOUTS = ({}, {"tp": 2}, {"cp": 2})
SHORT = ("2 mini-batches", "KL added")  # of the pairs: those of layouts with several ranks
GRPO = {"advantage": {"kind": "grpo"}, "modulation": None, "loss": {"aggregation": "token_mean", "mini_batches": 2}}
KL = {"coef": 0.1, "kind": "k3"}


def changed(algorithm: dict, **sections) -> dict:
    return {**algorithm, **{name: {**(algorithm.get(name) or {}), **keys} for name, keys in sections.items()}}


def pair(algorithm: dict, function: str = "grpo", **sections) -> list[dict]:
    """With the built-in loss and with `function`, and with `sections` for that one alone."""
    return [algorithm, changed(algorithm, loss={"kind": f"test_custom_functions:{function}"}, **sections)]


before_the_loss = changed(
    GRPO,
    advantage={"entropy_shaping": {}, "overlong_buffer": 0.5, "positive_weight": 0.5},
    loss={"entropy_top_ratio": 0.5},
    rollout_correction={"low": 0.2, "high": 1.3},
)
PAIRS = {
    "2 mini-batches": pair(GRPO),
    "what comes before the loss": pair(before_the_loss),
    "KL added": pair(changed(GRPO, loss={"mini_batches": 1}, kl=KL)),
    "KL by the function": pair(changed(GRPO, kl=KL), "grpo_with_kl", kl={"where": "function"}),
}
ONE_BATCH = changed(GRPO, loss={"mini_batches": 1, "kind": "test_custom_functions:grpo"})
NOT_FINITE = "tokens a loss or derivative that is NaN or infinite: loss"
WRONG = {  # what is said after the function's name
    "nan": f"{NOT_FINITE} nan, gradient norm nan before the optimizer step",
    "nan_gradient": f"{NOT_FINITE} 0, gradient norm nan before the optimizer step",
}


def on_rank(case, config, layout) -> dict:
    found = {name: compared(case["config"], PAIRS[name], layout) for name in case["pairs"]}
    return {**found, "wrong": wrong_functions(case["config"], layout)}


def build(config: dict, algorithm: dict, layout):
    from dynamo_megatron.config import Config
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.policy import Policy

    whole = Config.model_validate({**config, "algorithm": algorithm})
    spec = load_model_config(whole.model.path)
    return Policy(spec, whole, layout), TrainBatch.build(rollouts(spec.vocab_size, 7, None), whole, layout.gather)


def gap(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of a parameter, by its norm."""
    return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(ones, others, strict=True))


def compared(config: dict, algorithms: list[dict], layout) -> dict:
    """How far the built-in algorithm and the user's are apart after two steps."""
    found = []
    for algorithm in algorithms:
        policy, batch = build(config, algorithm, layout)
        before, updates = weights_of(policy), []
        minis = policy.pack(batch.rollouts, batch.mini_batches)
        for _ in range(2):
            stats, reference = (f(batch.rollouts, minis) for f in (policy.token_stats, policy.reference_logprobs))
            updates += [policy.update(batch, mini, stats, reference, 1e-3) for mini in minis]
        found.append((updates, weights_of(policy)))
    (updates, weights), (custom_updates, custom_weights) = found
    both = list(zip(updates, custom_updates, strict=True))
    return {
        "moved": gap(before, weights),
        "weights": gap(weights, custom_weights),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in both),
        "grad_norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in both),
        "kl": max(abs(a["kl"] - b["kl"]) / max(1.0, abs(a["kl"])) for a, b in both),
    }


def wrong_functions(config: dict, layout) -> dict[str, str]:
    from dynamo_megatron.algorithm.user_functions import load_loss
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.non_finite import NonFiniteError

    policy, batch = build(config, ONE_BATCH, layout)
    (mini,) = policy.pack(batch.rollouts, batch.mini_batches)
    stats = policy.token_stats(batch.rollouts, [mini])
    before, found = weights_of(policy), {}

    def update(name: str, function: str, advantages: np.ndarray) -> None:
        policy.head.loss_function = load_loss(f"test_custom_functions:{function}")
        given = TrainBatch(batch.rollouts, advantages, batch.mini_batches, batch.weights)
        try:
            found[name] = str(policy.update(given, mini, stats, None, 1e-3)["skipped"])
        except (ValueError, NonFiniteError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    for name in WRONG:
        update(name, name, batch.advantages)
    update("no advantage", "grpo", np.zeros_like(batch.advantages))
    broken = batch.advantages.copy()
    broken[batch.rollouts.rollout_ids.index("1-1")] = np.nan
    update("nan advantage", "grpo", broken)
    found["moved"] = str(gap(before, weights_of(policy)))
    return found


@pytest.fixture(scope="module")
def results(tiny_model, tmp_path_factory) -> list[list[dict]]:
    """What the ranks of each layout have found."""
    cases = []
    for parallel in LAYOUTS:
        sections = {"rollout": {"max_new_tokens": 32}, "trainer": {"micro_batch_tokens": 200}}
        case = {"config": settings(tiny_model, parallel, **sections), "ranks": 2 if parallel else 1}
        cases.append({**case, "pairs": SHORT if parallel else list(PAIRS)})
    return run_cases(__file__, cases, tmp_path_factory.mktemp("custom"))


def test_the_update_is_that_of_the_built_in_one(results):
    for found in (rank for ranks in results for rank in ranks):
        for name in found.keys() - {"wrong"}:
            gaps = found[name]
            assert gaps.pop("moved") > 1e-3 and all(gap <= 1e-5 for gap in gaps.values()), (name, gaps)


def test_a_wrong_function_is_named_in_one_line_before_the_optimizer_step(results):
    for found in (rank["wrong"] for ranks in results for rank in ranks):
        for name, said in WRONG.items():
            line = f"NonFiniteError: algorithm.loss.kind: test_custom_functions:{name} gave "
            assert found[name].startswith(line) and said in found[name] and "\n" not in found[name], found[name]
        assert found["moved"] == "0.0"


def test_a_function_is_not_blamed_for_what_it_was_given_and_no_gradient_skips(results):
    for found in (rank["wrong"] for ranks in results for rank in ranks):
        assert found["nan advantage"] == "NonFiniteError: loss nan, gradient norm nan before the optimizer step"
        assert found["no advantage"] == "1.0"
