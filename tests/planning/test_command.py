"""`dynamo-megatron plan` as users call it: exit codes, one line for bad input, the search's table."""

import json
import re
from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning.hardware import GIB, gpu_named

CONFIGS = Path(__file__).parents[2] / "configs"
MODEL_14B = str(CONFIGS / "models" / "qwen2.5-14b.yaml")
ON_16 = [MODEL_14B, str(CONFIGS / "hardware" / "h100x16" / "qwen2.5-14b.yaml"), str(CONFIGS / "paper.yaml")]
GPUS = ["--gpus", "16", "--gpu", "h100-80"]


def test_a_layout_that_fits(capsys):
    assert main(["plan", *ON_16, *GPUS]) == 0
    said = capsys.readouterr().out
    assert "14,770,033,664 parameters (as published" in said
    assert "GiB at the peak (processes 32.0, loading a checkpoint 330.2)" in said
    assert "checkpoint: 192.6 GiB each, 96.3 from each node, 2 kept; a copy of the weights 27.5 GiB" in said
    # 512 prompts x 16 rollouts of 4,096 tokens on average: 14 bytes a token and 1 kB a rollout
    assert "rollouts on disk: 0.4 GiB a step, 44.5 GiB in all" in said
    assert said.splitlines()[-1].startswith("fits: ")
    # 2 x (170 + 498 + 3 s), and 207 GB by two nodes at 0.87 GB/s
    assert "--stop-before 1800" in said


README = ["model.path=Qwen2.5-1.5B", "model.max_length=4096", "parallel.tp=2", "rollout.max_new_tokens=2048"]


def test_colocated_servers_use_all_gpus(capsys):
    assert main(["plan", "methods/dynamo", *README, "--gpus", "8", "--gpu", "h100-80"]) == 0
    assert "servers: 8 of 1 GPUs" in capsys.readouterr().out


def test_the_kind_of_a_gpu():
    known = {("NVIDIA H100 80GB HBM3", 79.1): "h100-80", ("NVIDIA A100-SXM4-80GB", 79.15): "a100-80"}
    known |= {("NVIDIA H100 NVL", 93.1): None, ("NVIDIA B200", 178.4): "b200-180"}
    for (name, gib), kind in known.items():
        found = gpu_named(name, gib * GIB)
        assert (found.name if found else None) == kind


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.micro_batch_tokens=24576"], "GiB too much on the fullest rank; optimizer.cpu_offload keeps 10.3 in"),
        (["model.max_length=null"], "on the fullest rank; a sequence may have 131,072 tokens: set model.max_length"),
        (["rollout.agent=mine:agent", "rollout.agent_tokens=24576"], "GiB too much on the fullest rank"),
        (["rollout.memory_fraction=0.88"], "GiB too much on the fullest rank; lower rollout.memory_fraction"),
        (["rollout.memory_fraction=0.18"], "a server's KV cache holds"),
        (
            ["rollout.placement=split", "rollout.memory_fraction=0.9"],
            "a server needs 81.2 GiB of a GPU's 79.1, 10.0",
        ),
    ],
)
def test_one_that_does_not_fit(words, says, capsys):
    assert main(["plan", *ON_16, *GPUS, *words]) == 1
    assert says in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_s_config_json_alone_is_enough(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-32B"]["config"]))
    assert main(["plan", *ON_16, f"model.path={tmp_path}", *GPUS]) == 1
    said = capsys.readouterr().out
    assert "qwen3, 64 layers, 32,762,123,264 parameters" in said and str(tmp_path) in said


def rows_of(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines[3:] if line.split()[0].isdecimal()]


def test_the_search_ranks_layouts(capsys):
    assert main(["plan", MODEL_14B, str(CONFIGS / "paper.yaml"), *GPUS, "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = rows_of(lines)
    assert [row[0] for row in rows] == [str(n) for n in range(1, len(rows) + 1)] and len(rows) == 20
    assert all(row[-1] == "yes" for row in rows)
    # Of those within 10 % of the shortest step the ones without context parallelism come first.
    near = [row for row in rows if float(row[12]) <= 1.1 * min(float(row[12]) for row in rows)]
    assert rows[: len(near)] == near and [row[5] for row in near] == sorted(row[5] for row in near)
    main(["plan", MODEL_14B, "methods/dynamo_published", *GPUS, "--search"])  # whose range is a micro-batch's
    assert {row[5] for row in rows_of(capsys.readouterr().out.splitlines())} == {"1"}
    # What is said of the first layout is what the plan says of it.
    keys = lines[-1].removeprefix("the first: ").split()
    assert main(["plan", MODEL_14B, str(CONFIGS / "paper.yaml"), *GPUS, *keys]) == 0
    assert f"together {rows[0][12]}" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "unit"), [(8, 1), (32, 8)])
def test_the_search_divides_the_gpus_of_a_split_run(gpus, unit, capsys):
    ahead = ["model.path=Qwen2.5-1.5B", "model.max_length=4096", "rollout.max_new_tokens=2048", "--gpu", "h100-80"]
    ahead += ["rollout.placement=split", "algorithm.rollout_correction.kind=truncate"]
    ahead += ["rollout.max_staleness=1"] if gpus == 8 else []
    assert main(["plan", *ahead, "--gpus", str(gpus), "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = rows_of(lines)
    divided = [(int(row[1]), int(row[9]) * int(row[10])) for row in rows]
    assert all(ranks % unit == 0 and ranks > 0 and 0 < serving <= gpus - ranks for ranks, serving in divided)
    assert len(set(divided)) > 1
    keys = lines[-1].removeprefix("the first: ").split()
    assert main(["plan", *ahead, "--gpus", rows[0][1], *keys]) == 0
    assert (
        f"together {rows[0][12]}{', generated while the ranks train' if gpus == 8 else ''}" in capsys.readouterr().out
    )


@pytest.mark.parametrize("search", [[], ["--search"]])
def test_what_a_plan_assumes_of_a_step_whose_rewards_decide(search, capsys):
    for method, rollouts in (("reinforce_ada", (256, 1024, 256)), ("pilot", (6144, 12288, 12288)), ("grpo", None)):
        main(["plan", f"methods/{method}", *README, "--gpus", "2", "--gpu", "h100-80", *search])
        lines = [line for line in capsys.readouterr().out.splitlines() if "algorithm.sequential" in line]
        assert [tuple(map(int, re.findall(r"\d+", line))) for line in lines] == ([rollouts] if rollouts else [])


FP8 = ["rollout.quantization=fp8", "algorithm.rollout_correction.level=token"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tp=3"], "parallel: 16 ranks can't be cut into tp 3"),
        (["rollout.servers=1"], "rollout.servers: 1 servers can't be spread evenly over 2 nodes; give a multiple of 2"),
        (["rollout.tp=3", "rollout.servers=2"], "rollout.tp: 3 server ranks cannot be proved to hold a model of 40"),
        (["rollout.tp=4", "rollout.servers=8"], "rollout.servers: 4 x rollout.tp 4 do not fit on the 8 GPUs of a node"),
        ([*FP8, "rollout.tp=8", "rollout.servers=2"], "and with rollout.tp 8 a server rank has an MLP width"),
        ([*FP8, "--gpu", "b200-180"], "SGLang takes no fp8 weights in a sync on b200-180; leave it out"),
        (["--response-tokens", "9000"], "--response-tokens: 9000 is above rollout.max_new_tokens 8192"),
        (["--gpus", "12"], "--gpus: 12 do not fill nodes of 8 (--gpus-per-node)"),
        (["model.path=/no/model"], "shapes known without a folder: Qwen2.5-1.5B"),
        (["models/qwen3-30b-a3b", "model.lora={rank: 16}"], "the MLPs of a mixture of experts have no adapters here"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert main(["plan", *ON_16, *GPUS, *words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and says in said.err and not said.out


def test_72b_with_adapters_as_documented(capsys):
    """The layout that is shipped, and every figure that docs/checkpoints.md gives of it."""
    page = CONFIGS.parent.joinpath("docs", "checkpoints.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"dynamo-megatron (plan .*hardware/h100x8/qwen2\.5-72b.*)", page)
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split()[2:] for line in lines if line.startswith("0 (0-7) "))
    parameters, gradients, optimizer, activations, *_, update, generate, _, _, left = row
    assert lines[-1] == f"fits: {left} GiB left on the fullest rank"
    figures = re.findall(r"\d+\.\d", page.partition("fits: ")[2].partition("- **Servers**")[0])
    assert figures == [left, update, parameters, gradients, optimizer, activations, generate]
