"""Partition invariance: two ranks as TP2, TP2 with sequence parallelism, PP2, DP2, and one rank, agree."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
LAYOUTS = {"tp2": {"tp": 2}, "tp2sp": {"tp": 2, "sequence_parallel": True}, "pp2": {"pp": 2}, "dp2": {}}


def case_config(model: Path, parallel: dict, budget: int, **algorithm) -> dict:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "none", "batch_prompts": 4},
        "output_dir": "none",
        "parallel": parallel,
        "rollout": {"max_new_tokens": 32},
        "algorithm": algorithm,
        "optimizer": {"eps": 1e-6, "warmup_steps": 0},
        "trainer": {"micro_batch_tokens": budget},
    }


def launch(cases: list[dict], ranks: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        Path(case["out"]).mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("layout_runs.py")), str(folder / "cases.json")]
    processes = []
    for rank in range(ranks):
        with open(folder / f"rank{rank}.log", "w") as log:
            env = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [p.wait(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks))
    assert codes == [0] * ranks, logs


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    return found


def differences(reference: Path, other: Path) -> dict[str, float]:
    a, b = (json.loads((p / "result.json").read_text()) for p in (reference, other))
    assert a["tokens"].keys() == b["tokens"].keys()
    flat = [
        torch.tensor([x for t in r["tokens"].values() for x in t[0]])
        for r in (a, {"tokens": {k: b["tokens"][k] for k in a["tokens"]}})
    ]
    updates = [[u for step in r["updates"] for u in step] for r in (a, b)]
    weights = [weights_of(p / "hf") for p in (reference, other)]
    assert weights[0].keys() == weights[1].keys()
    return {
        "logprobs": float((flat[0] - flat[1]).abs().max()),
        "loss": max(abs(x["loss"] - y["loss"]) for x, y in zip(*updates, strict=True)),
        "grad_norm": max(abs(x["grad_norm"] / y["grad_norm"] - 1) for x, y in zip(*updates, strict=True)),
        "weights": max(float((w - weights[1][n]).norm() / w.norm()) for n, w in weights[0].items()),
        **{name: max(abs(x[name] - y[name]) for x, y in zip(*updates, strict=True)) for name in ("damped", "selected")},
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    make = runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"]
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen3", "llama"):
        make(folder / family, family=family, dtype="float32", tied=family == "llama")
    return {family: folder / family for family in ("qwen2", "qwen3", "llama")}


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> Path:
    """One launch of one rank and one of two ranks hold every case."""
    folder = tmp_path_factory.mktemp("layouts")
    methods = {
        "dynamo": {"loss": {"mini_batches": 2, "clip_ratio_high": 0.28}},
        "full": {
            "loss": {"entropy_coef": 0.01, "clip_ratio_c": 3.0, "aggregation": "token_mean"},
            "kl": {"coef": 0.1},
            "modulation": {"expectation": "sequence_mean", "tau": 0.5},
            "advantage": {"kind": "grpo"},
        },
        # All that selects or weighs tokens, at once; test_method_layouts.py has each method by itself.
        "selecting": {
            "advantage": {"entropy_shaping": {}, "overlong_buffer": 0.5},
            "loss": {
                "mini_batches": 2,
                "entropy_top_ratio": 0.5,
                "clip_cov": {"ratio": 0.05, "low": 0.0},
                "kl_cov": {"ratio": 0.05, "coef": 0.1},
            },
            "modulation": {"stabiliser": "quantile", "quantile": 0.9, "gamma": 10.0},
            "rollout_correction": {"kind": "mask", "low": 0.2, "high": 1.5},
        },
    }

    def case(name, family, parallel, budget, method, **extra):
        config = case_config(models[family], parallel, budget, **methods[method])
        return {"config": config, "out": str(folder / name), **extra}

    one, two = [], []
    for family, method in (("qwen2", "dynamo"), ("qwen3", "full"), ("llama", "full")):
        one.append(case(f"{family}-one", family, {}, 400, method))
        for name, parallel in LAYOUTS.items():
            two.append(case(f"{family}-{name}", family, parallel, 100, method))
    one.append(case("qwen3-budget", "qwen3", {}, 100, "full"))
    one.append(case("qwen3-order", "qwen3", {}, 100, "full", order_seed=3))
    for name, budget in (("one", 400), ("budget", 100)):
        one.append(case(f"selecting-{name}", "qwen2", {}, budget, "selecting"))
    for name in ("tp2", "dp2"):
        two.append(case(f"selecting-{name}", "qwen2", LAYOUTS[name], 100, "selecting"))
    one.append(case("qwen2-fault", "qwen2", {}, 100, "dynamo", seeded_fault="micro_batch_mean"))
    two.append(case("nan", "qwen2", {}, 100, "dynamo", seeded_fault="nan"))
    two.append(case("no-signal", "qwen2", {}, 100, "dynamo", seeded_fault="no_signal"))
    launch(one, 1, folder / "one-rank")
    launch(two, 2, folder / "two-ranks")
    return folder


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_two_ranks_equal_one(runs, family, layout):
    found = differences(runs / f"{family}-one", runs / f"{family}-{layout}")
    print(family, layout, found)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("variant", ["budget", "order"])
def test_packing_and_order_do_not_matter(runs, variant):
    found = differences(runs / "qwen3-one", runs / f"qwen3-{variant}")
    print(variant, found)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("other", ["budget", "tp2", "dp2"])
def test_selections_are_over_the_whole_mini_batch(runs, other):
    found = differences(runs / "selecting-one", runs / f"selecting-{other}")
    print(other, found)
    assert max(found.values()) <= TOLERANCE, found
    updates = json.loads((runs / "selecting-one" / "result.json").read_text())["updates"]
    assert all(u["selected"] > 50 for step in updates for u in step)


def test_a_mean_per_micro_batch_is_caught(runs):
    found = differences(runs / "qwen2-one", runs / "qwen2-fault")
    assert found["logprobs"] <= TOLERANCE
    assert found["loss"] > 100 * TOLERANCE and found["weights"] > 10 * TOLERANCE


def test_nan_stops_before_the_optimizer_step_and_names_rank_and_prompt(runs):
    fault = json.loads((runs / "nan" / "fault.json").read_text())
    assert not fault["moved"]
    assert "before the optimizer step: rank " in fault["said"] and fault["said"].endswith("prompts b"), fault["said"]


def test_an_update_without_signal_is_skipped_and_counted(runs):
    fault = json.loads((runs / "no-signal" / "fault.json").read_text())
    assert fault == {"said": {"skipped": 1.0}, "moved": False}
