from pathlib import Path

import pytest
import yaml

from dynamo_megatron.config import Config

METHODS = Path(__file__).parents[2] / "configs" / "methods"


def load(name: str) -> Config:
    tree = yaml.safe_load((METHODS / f"{name}.yaml").read_text())
    tree["data"] = {"source": "train.jsonl", **tree.get("data", {})}
    return Config.model_validate({"model": {"path": "model"}, "output_dir": "out", **tree})


def test_presets_are_valid_and_what_they_say():
    grpo, dynamo, published = (load(name).algorithm for name in ("grpo", "dynamo", "dynamo_published"))
    assert (grpo.allocation.kind, grpo.advantage.kind, grpo.modulation) == ("uniform", "grpo", None)
    assert (dynamo.allocation.kind, dynamo.advantage.kind, dynamo.loss.aggregation) == ("neyman", "rloo", "prompt_mean")
    assert (dynamo.modulation.expectation, dynamo.modulation.scope) == ("exact", "mini_batch")
    assert (published.allocation.kind, published.allocation.power) == ("waterfill", "sigma2")
    assert (published.modulation.expectation, published.modulation.scope) == ("sequence_mean", "micro_batch")
    assert (published.loss.clip_ratio_high, published.loss.clip_ratio_c) == (0.28, 10.0)


def test_published_preset_has_the_papers_sizes():
    config = load("dynamo_published")
    assert config.rollout_budget == 16 * config.data.batch_prompts
    assert config.data.batch_prompts // config.algorithm.loss.mini_batches == 32


def test_theory_preset_is_the_default():
    assert load("dynamo").algorithm == Config.model_fields["algorithm"].default


@pytest.mark.parametrize("name", [path.stem for path in METHODS.glob("*.yaml")])
def test_every_method_file_loads(name):
    load(name)
