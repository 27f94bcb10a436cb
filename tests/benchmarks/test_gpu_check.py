import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import live_steps
import pytest
import training_steps
from training_steps import QWEN_1_5B, TINY, peak_flops, step_figures

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_parameters_are_the_models():
    biases = 28 * (1536 + 2 * 2 * 128)
    norms = 28 * 2 * 1536 + 1536
    assert QWEN_1_5B.parameters + biases + norms == 1_543_714_304  # what Qwen2.5-1.5B has


def test_flops_are_those_of_the_products():
    """A model of one layer, product by product: 2 m n k each; attention sees half of a sequence in the mean."""
    work = training_steps.Work(1, 8, 16, 2, 1, 32, "float32", 1, 2, 3, (3, 5), 64)
    assert work.lengths == [5, 7]
    total = 0
    for n in work.lengths:
        projections = 2 * n * 8 * (8 + 4 + 4) + 2 * n * 8 * 8
        mlp = 3 * 2 * n * 8 * 16
        attention = 2 * (2 * n * n * 8) / 2
        total += projections + mlp + attention + 2 * n * 8 * 32
    assert work.forward_flops == total


def test_mfu_is_of_the_device():
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12 and peak_flops("some GPU") is None
    line = dict.fromkeys(("step", "time/step", "time/weight_sync", "policy/loss", "policy/grad_norm"), 1.0)
    line |= {"time/update": 2.0, "time/logprobs": 1.0, "resources/gpu_memory_max": 7}
    figures = step_figures(TINY, line, 1e9)
    assert figures["update MFU"] == pytest.approx(3 * TINY.forward_flops / 2e9)
    assert figures["update and logprobs MFU"] == pytest.approx(4 * TINY.forward_flops / 3e9)
    assert step_figures(TINY, line, None)["update MFU"] is None


@pytest.mark.full
def test_the_whole_command_at_tiny_size(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--tiny", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(result) == list(gpu_check.NEEDED)
    assert all(part["passed"] and part["tiny"] for part in result.values())
    assert result["tests"]["tests"] > 0 and result["tests"]["failures"] == 0
    assert result["head"]["cases"][0]["contenders"]["eager, torch"]["seconds"]["samples"] > 0
    training = result["training"]
    assert [step["step"] for step in training["steps"]] == [1, 2, 3] and training["headline"] == training["steps"][-1]
    assert all(step["gradient norm"] > 0 and step["seconds"] > 0 for step in training["steps"])
    assert training["tokens a step"] == sum(TINY.lengths)
    assert not (tmp_path / "scratch" / "training" / "model").exists()  # gigabytes, at full size
    for way in live_steps.WAYS:
        assert len(result[way]["steps"]) == live_steps.STEPS and result[way]["wrong"] == []
        assert all(0 < s["push seconds"] < s["seconds"] and s["gap"] < 1e-4 for s in result[way]["steps"])
    assert result["live-turns"]["headline"]["released bytes"] > 0
    assert result["live-ranks"]["ranks"] == gpu_check.TINY_RANKS == 2
    dp, tp2 = (result["layouts"]["layouts"][name] for name in ("dp", "tp2"))
    assert dp["ranks"] == tp2["ranks"] == 2 and (dp["layout"], tp2["layout"]) == ({}, {"tp": 2})
    assert dp["headline"]["gradient norm"] == pytest.approx(tp2["headline"]["gradient norm"], rel=1e-3)


LIVE_STEP = {"gap": 0.01, "rejected": 0, "released bytes": 1, "server released bytes": 1}


@pytest.mark.parametrize(
    ("way", "cuda", "change", "said"),
    [
        ("live-disk", True, {}, None),
        ("live-disk", True, {"gap": 0.06}, "gap 0.06 is above"),
        ("live-disk", True, {"gap": float("nan")}, "gap nan is above"),
        ("live-memory", True, {"rejected": 2.0}, "2 rollouts rejected"),
        ("live-turns", True, {"server released bytes": 0}, "server released bytes 0"),
        ("live-turns", False, {"server released bytes": 0}, None),
        ("live-turns", False, {"released bytes": 0}, "released bytes 0"),
        ("live-memory", True, {"released bytes": None}, None),
    ],
)
def test_what_a_live_step_must_be(way, cuda, change, said):
    steps = [{**LIVE_STEP, **change, "step": i + 1} for i in range(live_steps.STEPS)]
    found = live_steps.wrong_with(way, steps, cuda)
    assert all(said in line for line in found) and len(found) == live_steps.STEPS if said else found == []
    assert live_steps.wrong_with(way, [], cuda) == [f"0 steps of {live_steps.STEPS}"]
