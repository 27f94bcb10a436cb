"""Every stated model on its stated hardware: its configs compose, and its plan fits."""

import re

import pytest
from clusters_table import CONFIGS, DOCUMENT, ON_HARDWARE, PAPER, SHAPE, document, planned

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import compose
from dynamo_megatron.planning.command import UNNEEDED, model_spec

MODELS = sorted(CONFIGS.glob("models/*.yaml"))


@pytest.mark.parametrize("hardware", ON_HARDWARE, ids=lambda path: f"{path.stem}-{path.parent.name}")
@pytest.mark.parametrize("method", ["dynamo", "dynamo_published"])
def test_it_fits(hardware, method):
    plan = planned(hardware, method)
    # What no GPU has confirmed needs a margin.
    assert plan.fits and plan.peak <= 0.9 * plan.cluster.gpu.memory, (plan.peak, plan.cluster.gpu.memory)
    assert plan.host.peak <= 0.95 * plan.cluster.gpu.host_memory
    assert plan.servers.gpus == plan.cluster.gpus  # a server rank on every GPU
    assert plan.servers.longest_sequences >= 4
    assert plan.config.checkpoint.every >= 10  # else writing takes a large part of a step


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


@pytest.mark.parametrize("hardware", ON_HARDWARE, ids=lambda path: f"{path.stem}-{path.parent.name}")
def test_launch_slurm_asks_for_what_the_plan_says(hardware, capsys):
    plan = planned(hardware, "dynamo")
    names = [f"models/{hardware.stem}", f"hardware/{hardware.parent.name}/{hardware.stem}", "methods/dynamo", "paper"]
    keys = [*SHAPE.split(), "data.source=/data/train.parquet", "rollout.host=ib0", "output_dir=/runs/a"]
    options = ["--nodes", str(plan.cluster.nodes), "--gpus-per-node", "8", "--gpu", plan.cluster.gpu.name, "--dry-run"]
    assert main(["launch", "slurm", *names, *keys, *options, "--time", "24:00:00"]) == 0
    captured = capsys.readouterr()
    (seconds,) = re.findall(r"--signal=B:USR1@(\d+)", captured.out)
    assert int(seconds) == max(plan.stop_before, 1800) and captured.err == ""
    assert "#SBATCH --cpus-per-task=8\n" in captured.out and f"#SBATCH --mem={plan.host.asked}\n" in captured.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "with --gpu KIND it is what `plan` asks for"),
        (["--gpu", "h100-80", "model.path=/nowhere"], "there is no plan: /nowhere"),
    ],
)
def test_without_a_plan_launch_slurm_has_a_default_and_names_it(options, says, capsys):
    words = ["models/qwen2.5-14b", "data.source=d", "output_dir=/runs/a", "--gpus-per-node", "8", "--dry-run", *options]
    assert main(["launch", "slurm", *words]) == 0
    captured = capsys.readouterr()
    assert "--signal=B:USR1@1800" in captured.out and captured.err.count("\n") == 1
    assert "; --mem: the cluster's default, which may be too little" in captured.err and "--mem=" not in captured.out
    assert captured.err.startswith("--stop-before: 1800 s, the default") and says in captured.err


def test_launch_slurm_refuses_an_unknown_kind_of_gpu(capsys):
    words = ["models/qwen2.5-14b", "data.source=d", "output_dir=/runs/a", "--gpus-per-node", "8", "--dry-run"]
    assert main(["launch", "slurm", *words, "--gpu", "h99"]) == 2
    assert capsys.readouterr().err.startswith("--gpu: 'h99' is unknown; give one of a100-80, ")


def test_the_page_has_the_planner_s_figures():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(text), "python -P tests/planning/clusters_table.py rewrites it"
