"""Every stated model on its stated hardware: its configs compose and its plan fits."""

from pathlib import Path

import pytest

from dynamo_megatron.config.files import compose
from dynamo_megatron.jobs.start_checks import check_ranks
from dynamo_megatron.planning.command import UNNEEDED, model_spec
from dynamo_megatron.planning.hardware import GPUS, Cluster
from dynamo_megatron.planning.plan import make_plan, workload

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = CONFIGS / "paper.yaml"
MODELS = sorted(CONFIGS.glob("models/*.yaml"))
ON_HARDWARE = sorted(CONFIGS.glob("hardware/*/*.yaml"))
# The prompts and rollouts that methods/dynamo is for: as many rollouts as the paper's, two of each prompt.
SHAPE = ["data.batch_prompts=4096", "algorithm.allocation.rollout_n_min=1"]


def planned(hardware, method):
    """The plan of `configs/hardware/KINDxN/MODEL.yaml` with a method at the paper's sizes."""
    files = [CONFIGS / "models" / hardware.name, PAPER, hardware, CONFIGS / "methods" / f"{method}.yaml"]
    config, _ = compose([str(file) for file in files], SHAPE if method == "dynamo" else [], UNNEEDED)
    kind, gpus = hardware.parent.name.split("x")
    (gpu,) = (gpu for name, gpu in GPUS.items() if name.startswith(kind))
    spec, _ = model_spec(config)
    check_ranks(config, spec, int(gpus))
    return make_plan(config, spec, Cluster(gpu, int(gpus), 8), workload(config, spec))


@pytest.mark.parametrize("hardware", ON_HARDWARE, ids=lambda path: f"{path.stem}-{path.parent.name}")
@pytest.mark.parametrize("method", ["dynamo", "dynamo_published"])
def test_it_fits(hardware, method):
    plan = planned(hardware, method)
    # What no GPU has confirmed needs a margin.
    assert plan.fault is None and plan.peak <= 0.9 * plan.cluster.gpu.memory
    assert sum(plan.host.values()) <= 1.9e12  # of the 2 TB of a maker's node
    assert plan.servers.gpus == plan.cluster.gpus  # a server rank on every GPU
    assert plan.servers.longest_sequences >= 4
    assert plan.config.checkpoint.every >= 10  # else writing takes a large part of a step
    if method == "dynamo":
        assert plan.config.optimizer.lr == (1e-6 if plan.config.model.lora is None else 1e-5)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_file_names_a_published_model(path):
    config, _ = compose([str(path)], [], UNNEEDED)
    spec, _ = model_spec(config)
    assert config.model.max_length <= spec.max_positions
    assert path.stem in {file.stem for file in ON_HARDWARE}


def test_the_published_method_has_the_paper_s_sizes():
    files = [str(CONFIGS / name) for name in ("models/qwen2.5-math-7b.yaml", "methods/dynamo_published.yaml")]
    config, _ = compose(files, [], UNNEEDED)
    allocation, optimizer = config.algorithm.allocation, config.optimizer
    assert (config.data.batch_prompts, config.rollout_budget) == (512, 16 * 512)
    assert (allocation.rollout_n_min, allocation.rollout_n_max) == (8, 24)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps, optimizer.clip_grad) == (1e-6, 0.1, 10, 1.0)
    assert compose([files[0], str(PAPER), files[1]], [], UNNEEDED)[0] == config
