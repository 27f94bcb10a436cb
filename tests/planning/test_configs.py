"""Every stated model on its stated hardware: its configs compose, and its plan fits."""

import pytest
from clusters_table import CONFIGS, DOCUMENT, ON_HARDWARE, PAPER, document, planned

from dynamo_megatron.config_files import compose
from dynamo_megatron.planning.command import UNNEEDED, model_spec

MODELS = sorted(CONFIGS.glob("models/*.yaml"))


@pytest.mark.parametrize("hardware", ON_HARDWARE, ids=lambda path: f"{path.stem}-{path.parent.name}")
@pytest.mark.parametrize("method", ["dynamo", "dynamo_published"])
def test_it_fits(hardware, method):
    plan = planned(hardware, method)
    # What no GPU has confirmed needs a margin.
    assert plan.fits and plan.peak <= 0.9 * plan.cluster.gpu.memory, (plan.peak, plan.cluster.gpu.memory)
    assert plan.host.peak <= 0.9 * plan.cluster.gpu.host_memory
    assert plan.servers.gpus == plan.cluster.gpus  # a server rank on every GPU
    assert plan.servers.longest_sequences >= 4
    # A step of 14B or more is too long to do ten of again.
    assert plan.config.checkpoint.every == (10 if "math" in hardware.stem else 1)


def test_the_eight_models():
    names = {"qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"}
    names |= {"qwen3-14b", "qwen3-32b", "qwen3-30b-a3b"}
    assert {path.stem for path in MODELS} == names == {path.stem for path in ON_HARDWARE}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_file_names_a_published_model(path):
    config, _ = compose([str(path)], [], UNNEEDED)
    spec, _ = model_spec(config)
    assert config.model.max_length <= spec.max_positions
    if "math" in path.stem:
        assert config.model.max_length == spec.max_positions == 4096


def test_the_paper_s_sizes():
    config, _ = compose([str(CONFIGS / "models" / "qwen2.5-math-7b.yaml"), str(PAPER)], [], UNNEEDED)
    allocation, loss, optimizer = config.algorithm.allocation, config.algorithm.loss, config.optimizer
    assert (config.data.batch_prompts, config.rollout_budget) == (512, 16 * 512)
    assert (allocation.rollout_n_min, allocation.rollout_n_max) == (8, 24)
    assert config.data.batch_prompts / loss.mini_batches == 32
    assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps, optimizer.clip_grad) == (1e-6, 0.1, 10, 1.0)
    assert config.algorithm.kl.coef == 0 and config.rollout.temperature == 1.0


def test_the_published_method_has_the_same_sizes():
    """dynamo_published.yaml stands alone; paper.yaml changes nothing."""
    model, published = CONFIGS / "models" / "qwen2.5-math-7b.yaml", CONFIGS / "methods" / "dynamo_published.yaml"
    alone, _ = compose([str(model), str(published)], [], UNNEEDED)
    both, _ = compose([str(model), str(PAPER), str(published)], [], UNNEEDED)
    assert alone == both


def test_the_page_has_the_planner_s_figures():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text), "python -P tests/planning/clusters_table.py rewrites it"
