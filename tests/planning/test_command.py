"""`dynamo-megatron plan` as users call it: exit codes, one line for bad input, the search's table."""

import json
import time
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
    assert "layout: tp 4 x dp 4, sequence-parallel, recompute none" in said
    assert "GiB at the peak (processes 32.0, loading a checkpoint 330.2)" in said
    assert "a maker's node of h100-80 has 1862.6: fits" in said
    assert said.splitlines()[-1].startswith("fits: ") and "what limits: " in said


def test_a_save_says_what_each_node_writes(capsys):
    """14.8 billion parameters x 14 bytes, half of them on each node, and nothing that ranks send each other."""
    assert main(["plan", *ON_16, *GPUS]) == 0
    said = capsys.readouterr().out
    assert (
        "a save, every 10 steps: each rank writes its own part and sends none of it to another one, 192.6 GiB" in said
    )
    assert ", 96.3 GiB from each node" in said
    assert main(["plan", *ON_16, *GPUS, "checkpoint.every=null"]) == 0
    assert "a save, at a stop alone: " in capsys.readouterr().out


def test_what_the_checksums_of_a_sync_cost_is_said(capsys):
    """14.77 billion parameters x 2 bytes on one rank; 46 operations of 16 bytes a word of 4, at 3.35 TB/s."""
    main(["plan", *ON_16, *GPUS])
    assert "its checksums: a sender hashes 27.5 GiB, at least 1.62 s" in capsys.readouterr().out
    main(["plan", *ON_16, *GPUS, "parallel.tp=8", "parallel.pp=2"])
    # A stage of 24 layers, and the vocabulary's 152,064 x 5,120 at one end.
    assert "hashes 13.8 GiB, at least 0.81 s" in capsys.readouterr().out
    main(["plan", *ON_16, *GPUS, "rollout.proof.checksums=false"])
    assert "its checksums" not in capsys.readouterr().out


README = ["model.path=Qwen2.5-1.5B", "model.max_length=4096", "parallel.tp=2", "rollout.max_new_tokens=2048"]


@pytest.mark.parametrize(
    ("keys", "servers", "idle"),
    [
        ([], "8 of 1", None),
        (["rollout.tp=2"], "4 of 2", None),
        (
            ["rollout.servers=1"],
            "1 of 1",
            "7 of 8 GPUs are idle while servers generate: rollout.servers 1 x",
        ),
        (["rollout.placement=split"], "1 of 1", None),
    ],
)
def test_colocated_servers_use_all_gpus_unless_a_number_is_given(keys, servers, idle, capsys):
    assert main(["plan", "methods/dynamo", *README, "--gpus", "8", "--gpu", "h100-80", *keys]) == 0
    said = capsys.readouterr().out
    assert f"servers: {servers} GPUs" in said and (idle in said if idle else "idle" not in said)


@pytest.mark.parametrize(("keys", "warned"), [([], False), (["rollout.timeout=600"], True)])
def test_a_timeout_that_long_responses_cannot_keep(keys, warned, capsys):
    long = ["model.path=Qwen2.5-14B", "model.max_length=33792", "rollout.max_new_tokens=32768"]
    main(["plan", "paper", *long, "rollout.tp=2", "rollout.memory_fraction=0.7", *GPUS, *keys])
    said = capsys.readouterr().out
    assert ("rollout.timeout is 600 s, and a response of 32768 tokens takes at least" in said) == warned, said


def test_a_timeout_that_no_long_response_can_keep_is_no_plan(capsys):
    """At least 32,768 reads of half of 29.5 GB at 3.35 TB/s: 144 s."""
    long = ["model.path=Qwen2.5-14B", "model.max_length=33792", "rollout.max_new_tokens=32768"]
    words = ["plan", "paper", *long, "parallel.tp=8", "parallel.sequence_parallel=true", "trainer.recompute=full"]
    words += ["rollout.tp=2", "rollout.memory_fraction=0.7", *GPUS]
    assert main([*words, "rollout.timeout=140"]) == 1
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("cannot work: rollout.timeout is 140 s, and a response of 32768 tokens")
    assert said.count("rollout.timeout is") == 1
    assert main([*words, "rollout.timeout=600"]) == 0
    assert "cannot work" not in capsys.readouterr().out


@pytest.mark.parametrize(("gpu", "said"), [("a100-80", True), ("h100-80", False), ("b200-180", False)])
def test_a_gpu_without_fast_attention_of_packed_sequences(gpu, said, capsys):
    main(["plan", "methods/dynamo", *README, "--gpus", "8", "--gpu", gpu])
    assert ("no fast attention of packed sequences on a100-80" in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-80"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA H200", 139.7, "h200-141"),
        ("NVIDIA B200", 178.4, "b200-180"),
    ],
)
def test_the_kind_of_a_gpu(name, gib, kind):
    found = gpu_named(name, gib * GIB)
    assert (found.name if found else None) == kind


def test_what_rollouts_take_on_disk_and_how_many_steps_stay(capsys):
    """512 prompts x 16 rollouts of 4,096 tokens on average: 14 bytes a token and 1 kB a rollout."""
    main(["plan", *ON_16, *GPUS, "--response-tokens", "4096", "trainer.steps=10000"])
    said = capsys.readouterr().out
    assert "rollouts on disk: 0.4 GiB a step; all 10000 steps are 4451.3 GiB, kept while they take less" in said
    main(["plan", *ON_16, *GPUS, "--response-tokens", "4096", "rollout.keep_last=9"])
    assert "0.4 GiB a step; 9 steps and the one being made are kept, 4.5 GiB" in capsys.readouterr().out
    main(["plan", *ON_16, *GPUS, "--response-tokens", "4096", "trainer.steps=10000", "checkpoint.every=null"])
    said = capsys.readouterr().out
    assert "all 10000 steps are 4451.3 GiB, and all are kept: without checkpoints (checkpoint.every: null)" in said


def test_one_that_does_not(capsys):
    assert main(["plan", *ON_16, *GPUS, "trainer.micro_batch_tokens=20480"]) == 1
    assert "too much" in capsys.readouterr().out.splitlines()[-1]


def test_a_server_too_small_for_a_sequence(capsys):
    assert main(["plan", *ON_16, *GPUS, "rollout.memory_fraction=0.18"]) == 1
    assert "a server's KV cache holds" in capsys.readouterr().out.splitlines()[-1]


def test_a_server_of_its_own_gpu_that_leaves_no_room_beside_its_cache(capsys):
    words = ["rollout.placement=split", "rollout.memory_fraction=0.9"]
    assert main(["plan", *ON_16, *GPUS, *words]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == (
        "does not fit: a server needs 81.2 GiB of a GPU's 79.1, 10.0 of them beside weights and KV cache; "
        "lower rollout.memory_fraction"
    )


def test_what_the_figures_leave_out_is_said(capsys):
    assert main(["plan", *ON_16, *GPUS, "parallel.cp=2"]) == 0
    # 40 heads over tp 4, 10240 x 5120 scores of 2 bytes
    assert "may build the scores, 1.0 GiB a layer" in capsys.readouterr().out
    experts = CONFIGS / "hardware" / "h100x32" / "qwen3-30b-a3b.yaml"
    files = [str(CONFIGS / "models" / experts.name), str(experts), str(CONFIGS / "paper.yaml")]
    assert main(["plan", *files, "--gpus", "32", "--gpu", "h100-80"]) == 0
    assert "tokens are taken to spread evenly over the experts" in capsys.readouterr().out
    assert main(["plan", *ON_16, *GPUS]) == 0
    said = capsys.readouterr().out
    assert "scores" not in said and "evenly" not in said


def test_a_step_that_a_stop_waits_for_longer_than_the_default_is_said(capsys):
    assert main(["plan", *ON_16, *GPUS]) == 0
    said = capsys.readouterr().out
    # 7 x (97.0 + 279.2 s), and 207 GB by two nodes at 1 GB/s
    assert "a stop waits at least 376 s" in said and "--stop-before 3000 (the default: 1800)" in said
    assert main(["plan", *ON_16, *GPUS, "--response-tokens", "1000"]) == 0
    assert "--stop-before" not in capsys.readouterr().out


def test_a_folder_s_config_json_alone_is_enough(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-32B"]["config"]))
    assert main(["plan", *ON_16, f"model.path={tmp_path}", *GPUS]) == 1
    said = capsys.readouterr().out
    assert "qwen3, 64 layers, 32,762,123,264 parameters" in said and str(tmp_path) in said


def test_the_search_ranks_layouts_within_seconds(capsys):
    started = time.process_time()  # its own seconds, not those of others on this machine
    assert main(["plan", MODEL_14B, str(CONFIGS / "paper.yaml"), *GPUS, "--search"]) == 0
    assert time.process_time() - started < 10
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[3:-2]]
    assert [row[0] for row in rows] == [str(n) for n in range(1, len(rows) + 1)] and len(rows) == 20
    assert all(row[-1] == "yes" for row in rows)
    # Of those within 10 % of the shortest step the ones without context parallelism come first.
    near = [row for row in rows if float(row[10]) <= 1.1 * min(float(row[10]) for row in rows)]
    assert rows[: len(near)] == near and [row[4] for row in near] == sorted(row[4] for row in near)
    (shipped,) = [row for row in rows if row[1:8] == ["4", "1", "1", "1", "1", "4", "none"]]
    assert lines[-2].startswith(
        f"the shipped layout, hardware/h100x16/qwen2.5-14b, is row {shipped[0]} with {shipped[10]} s: it was chosen"
    )
    # What is said of the first layout is what the plan says of it.
    keys = lines[-1].removeprefix("the first: ").split()
    assert main(["plan", MODEL_14B, str(CONFIGS / "paper.yaml"), *GPUS, *keys]) == 0
    assert f"together {rows[0][10]}" in capsys.readouterr().out


AHEAD = [
    *("model.path=Qwen2.5-1.5B", "model.max_length=4096", "rollout.max_new_tokens=2048"),
    *(
        "rollout.max_staleness=1",
        "rollout.placement=split",
        "algorithm.rollout_correction.kind=truncate",
        "--gpu",
        "h100-80",
    ),
]


def floors(said: str) -> dict[str, float]:
    (line,) = [line for line in said.splitlines() if line.startswith("  generate ")]
    words = line.replace(",", "").replace(";", "").replace("-", "").split()
    return {name: float(words[words.index(name) + 1]) for name in ("generate", "logprobs", "update", "weights")} | {
        "step": float(words[words.index("together") + 1])
    }


MANY = ["model.path=Qwen2.5-14B", "rollout.servers=64", "algorithm.allocation.budget=4096", "data.batch_prompts=512"]


@pytest.mark.parametrize(("keys", "who"), [(["rollout.servers=1"], "ranks wait"), (MANY, "servers wait")])
def test_a_plan_says_who_waits_for_whom(keys, who, capsys):
    main(["plan", *AHEAD, *keys, "--gpus", "8"])
    said = capsys.readouterr().out
    found = floors(said)
    training = found["logprobs"] + found["update"]
    assert found["step"] == pytest.approx(max(found["generate"], training) + found["weights"], abs=0.11)
    wait = abs(found["generate"] - training)
    assert float(said.partition(f"the {who} ")[2].split()[0]) == pytest.approx(wait, abs=0.16)
    main(["plan", *AHEAD, *keys, "--gpus", "8", "rollout.max_staleness=0"])
    said = capsys.readouterr().out
    assert floors(said)["step"] == pytest.approx(sum(found.values()) - found["step"], abs=0.21) and who not in said


@pytest.mark.parametrize(("gpus", "unit"), [(8, 1), (32, 8)])
def test_the_search_divides_the_gpus_between_ranks_and_servers(gpus, unit, capsys):
    assert main(["plan", *AHEAD, "--gpus", str(gpus), "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines[3:] if line.split()[0].isdecimal()]
    divided = [(int(row[1]), int(row[2])) for row in rows]
    assert all(ranks % unit == 0 and ranks > 0 and 0 < serving <= gpus - ranks for ranks, serving in divided)
    assert len(set(divided)) > 1 and any(" wait " in line for line in lines)
    keys = lines[-1].removeprefix("the first: ").split()
    assert main(["plan", *AHEAD, "--gpus", rows[0][1], *keys]) == 0
    assert f"together {rows[0][12]}," in capsys.readouterr().out


FP8 = ["rollout.quantization=fp8", "algorithm.rollout_correction.level=token"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.tp=3"], "parallel: 16 ranks can't be cut into tp 3"),
        (["parallel.tp=16"], "parallel.tp: 16 does not divide the 40 (attention heads)"),
        (["paralel.tp=2"], "unknown key paralel; did you mean parallel?"),
        (["rollout.servers=1"], "rollout.servers: 1 servers can't be spread evenly over 2 nodes; give a multiple of 2"),
        (["rollout.tp=3", "rollout.servers=2"], "rollout.tp: 3 ranks of a server can't share 40 attention"),
        (["rollout.tp=4", "rollout.servers=8"], "rollout.servers: 8 servers of 4 GPUs do not fit on 16"),
        (
            [*FP8, "rollout.tp=8", "rollout.servers=2"],
            "128 values, and with rollout.tp 8 a server rank has an MLP width",
        ),
        (
            [*FP8, "--gpu", "b200-180"],
            "SGLang takes no pushes of fp8 weights on b200-180; leave it out",
        ),
        (
            ["rollout.max_staleness=1", "algorithm.rollout_correction.level=sequence"],
            "colocated ones have the same GPUs; set rollout.placement to split, or max_staleness to 0",
        ),
        (["rollout.max_new_tokens=10240"], "rollout.max_new_tokens: 10240 tokens leave 0 of 10240"),
        (["--response-tokens", "9000"], "--response-tokens: 9000 is above rollout.max_new_tokens 8192"),
        (["--gpus", "12"], "--gpus: 12 do not fill nodes of 8 (--gpus-per-node)"),
        (["--gpus-per-node", "6"], "--gpus: 16 do not fill nodes of 6 (--gpus-per-node)"),
        (["--gpu", "h900"], "--gpu: 'h900' is unknown; give one of a100-80, h100-80, h200-141, b200-180"),
        (["model.path=/no/model"], "shapes known without a folder: Qwen2.5-1.5B"),
    ],
)
def test_bad_input_is_one_line(words, says, capsys):
    assert main(["plan", *ON_16, *GPUS, *words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and says in said.err and not said.out
