from pathlib import Path

import pytest
import yaml

from dynamo_megatron.algorithm.premises import premise_warnings
from dynamo_megatron.config import Config
from dynamo_megatron.config.method import AGGREGATIONS

METHODS = Path(__file__).parents[2] / "configs" / "methods"


def warnings(
    allocation=None,
    advantage="rloo",
    aggregation="prompt_mean",
    functions=("math",),
    singleton="zero",
    loss=None,
    **more,
):
    """The keys that each warning begins with."""
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"source": "train.jsonl"},
            "reward": {"functions": list(functions)},
            "algorithm": {
                "allocation": allocation or {},
                "advantage": {"kind": advantage, "singleton": singleton},
                "loss": {"aggregation": aggregation, **(loss or {})},
                **more,
            },
            "output_dir": "out",
        }
    )
    found = premise_warnings(config)
    assert all("\n" not in w and "; set " in w for w in found), "one line that says how to mend it"
    return [w.split()[0].removeprefix("algorithm.").rstrip(":") for w in found]


def test_what_fits_together_is_silent():
    assert warnings() == warnings({"kind": "waterfill"}) == warnings(aggregation="prompt_token_mean") == []


def test_uniform_has_no_theory_to_undo():
    for aggregation in AGGREGATIONS:
        assert warnings({"kind": "uniform", "rollout_n_min": 1}, "grpo", aggregation, ("math", "a:b")) == []


@pytest.mark.parametrize("kind", ["neyman", "waterfill", "my.module:Mine"])
def test_allocation_against_advantage_and_aggregation(kind):
    assert warnings({"kind": kind}, "grpo") == ["advantage.kind=grpo"]
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant_length"):
        assert warnings({"kind": kind}, aggregation=aggregation) == [f"loss.aggregation={aggregation}"]
    assert len(warnings({"kind": kind}, "grpo", "token_mean")) == 2


def test_rounds_that_look_at_their_outcomes():
    uniform = {"kind": "uniform"}
    for kind in ("pilot", "reinforce_ada"):
        rule = {"kind": kind, "round_n": 4}
        assert warnings(uniform, sequential=rule) == [f"sequential.kind={kind}"]
    assert warnings(uniform, sequential={"kind": "pilot", "round_n": 4, "explore": 0.25}) == []


def test_small_groups():
    assert warnings({"rollout_n_min": 2}, "dr_grpo") == ["advantage.kind=dr_grpo"]
    assert warnings({"rollout_n_min": 8}, "dr_grpo") == []


def test_rewards_that_are_not_success():
    assert warnings(functions=("math", "a:b")) == ["allocation.variance=bernoulli"]
    assert warnings({"variance": "empirical"}, functions=("math", "a:b")) == []


def test_rewards_of_tokens_that_the_allocation_does_not_count():
    config = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}
    config["reward"] = {"functions": ["math", "prime"], "prime": {"model": "p"}}
    (found,) = premise_warnings(Config.model_validate(config))
    assert found.startswith("reward.functions: prime adds") and found.endswith("set algorithm.allocation.kind=uniform")
    config["algorithm"] = {"allocation": {"kind": "uniform"}}
    assert premise_warnings(Config.model_validate(config)) == []
    config["algorithm"]["allocation"]["rollout_n_min"] = 1
    config["algorithm"]["advantage"] = {"kind": "history"}
    assert premise_warnings(Config.model_validate(config)) == [], "8 each"
    config["algorithm"]["allocation"]["budget"] = 32
    (found,) = premise_warnings(Config.model_validate(config))
    assert found.startswith("algorithm.allocation.rollout_n_min=1: process rewards are compared within the group alone")


def test_presets():
    def of(name):
        tree = yaml.safe_load((METHODS / f"{name}.yaml").read_text())
        tree["data"] = {"source": "train.jsonl", **tree.get("data", {})}
        return premise_warnings(Config.model_validate({"model": {"path": "model"}, "output_dir": "out", **tree}))

    assert of("dynamo") == of("grpo") == []
    assert len(of("dynamo_published")) == 2, "grpo and token_mean under waterfill: the published method is what it is"


def test_one_update_a_step_has_nothing_to_clip_or_hold():
    uniform, high = {"kind": "uniform"}, {"clip_ratio_high": 0.28}
    assert warnings(uniform, "grpo", loss=high) == ["loss.mini_batches=1"]
    assert warnings(uniform, "grpo", loss={"kl_cov": {}}) == ["loss.mini_batches=1"]
    assert warnings(uniform, "grpo", loss={**high, "mini_batches": 2}) == []


def test_without_a_baseline_every_group_teaches():
    assert warnings(advantage="reinforce") == ["advantage.kind=reinforce"]
    assert warnings({"kind": "uniform"}, "reinforce") == []
    assert warnings({"kind": "uniform"}, "reinforce", dynamic_sampling={}) == ["dynamic_sampling"]


@pytest.mark.parametrize("allocation", [{"kind": "waterfill"}, {"kind": "cero"}, {"static": True}])
def test_history_that_is_never_forgotten(allocation):
    assert warnings(allocation, "history") == ["advantage.kind=history"]
    assert warnings(allocation) == [] and warnings({}, "history") == []


def test_a_learning_rate_of_0_trains_nothing():
    config = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o", "optimizer": {"lr": 0}}
    (found,) = premise_warnings(Config.model_validate(config))
    assert found.startswith("optimizer.lr=0: the weights stay as they are")


def test_drawing_weights_need_every_group():
    selection = {"kind": "priority", "weights": True}
    config = {"model": {"path": "m"}, "data": {"source": "d", "selection": selection}, "output_dir": "o"}
    assert premise_warnings(Config.model_validate(config)) == []
    config["algorithm"] = {"dynamic_sampling": {}}
    (found,) = premise_warnings(Config.model_validate(config))
    assert found.startswith("data.selection.weights is unbiased only if")
