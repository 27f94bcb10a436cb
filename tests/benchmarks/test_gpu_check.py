import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import live_steps
import pytest
import torch
import training_steps
from training_steps import QWEN_1_5B, TINY, peak_flops, step_figures

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "needs a GPU" in said.err and "--tiny" in said.err


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
    line = dict.fromkeys(("step", "time/step", "time/reshard", "policy/loss", "policy/grad_norm"), 1.0)
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


def test_parts_run_one_by_one_go_into_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_part", lambda part, tiny, *_: {**outcomes[part], "tiny": tiny})
    outcomes = {part: {"passed": part != "head", "exit code": 0} for part in gpu_check.NEEDED}
    codes = []
    for part in ("tests", "head", "training"):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--part", part, "--out", str(tmp_path)])
        codes.append(gpu_check.main())
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert codes == [0, 1, 0] and list(result) == ["tests", "head", "training"]
    assert not result["head"]["passed"] and "head: FAILED" in capsys.readouterr().out


def test_what_has_passed_is_left_out_on_resume(tmp_path, monkeypatch):
    ran, passes = [], {"head": False}

    def run_part(part, tiny, *_):
        ran.append(part)
        return {"passed": passes.get(part, True), "exit code": 0, "tiny": tiny}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    codes = []
    for words, passes["head"] in (([], False), (["--resume"], True), (["--resume"], True), ([], True)):
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--out", str(tmp_path), *words])
        codes.append(gpu_check.main())
        ran.append("-")
    parts = list(gpu_check.NEEDED)
    assert codes == [1, 0, 0, 0] and ran == [*parts, "-", "head", "-", "-", *parts, "-"]


def test_layouts_that_train_differently_fail():
    def ran(norm, code=0):
        return {"exit code": code, "steps": [{"gradient norm": norm}]}

    assert gpu_check.wrong_layouts({"dp": ran(2.0), "tp2": ran(2.01)}) == []
    for norm in (2.1, 1.9, float("nan")):
        (said,) = gpu_check.wrong_layouts({"dp": ran(2.0), "tp2": ran(norm)})
        assert "gradient norm 2 data parallel" in said
    assert gpu_check.wrong_layouts({"dp": ran(2.0, code=1)}) == ["dp: exit code 1"]


@pytest.mark.parametrize(("gpus", "runs"), [(1, False), (8, True)])
def test_parts_of_several_gpus_run_where_there_are_some(tmp_path, monkeypatch, gpus, runs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(gpu_check, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(gpu_check, "DISK_BYTES", 0)
    monkeypatch.setattr(gpu_check, "run_part", lambda part, *_: {"passed": True, "exit code": 0, "tiny": False})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path), "--server-python", sys.executable])
    assert gpu_check.main() == 0
    ran = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {"layouts", "live-ranks"} <= ran.keys() if runs else not {"layouts", "live-ranks"} & ran.keys()


def test_without_a_servers_interpreter_the_live_parts_are_left_out_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(gpu_check, "DISK_BYTES", 0)
    monkeypatch.setattr(gpu_check, "run_part", lambda part, *_: {"passed": True, "exit code": 0, "tiny": False})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())) == ["tests", "head", "training"]
    assert "left out: live-disk, live-memory, live-turns, which need --server-python" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--part", "live-disk", "--out", str(tmp_path)])
    assert gpu_check.main() == 2
    assert "live-disk needs --server-python" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--server-python", "python", "--out", str(tmp_path)])
    assert gpu_check.main() == 0
    of_one = [part for part in gpu_check.NEEDED if part not in gpu_check.OF_SEVERAL_GPUS]
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())) == of_one


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


def test_what_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(gpu_check.NEEDED, "tests", ("torch", "no_such.module"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--part", "tests"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err.endswith(" has no no-such.module, which tests need\n")


@pytest.mark.full
def test_a_failed_run_is_told(tmp_path):
    """The log's end, and no headline: here a response is longer than the model's positions."""
    work = dataclasses.replace(TINY, response_tokens=(2100,))
    result = training_steps.run(work, tmp_path / "training", "torch", 200)
    assert result["exit code"] != 0 and result["log"] and "headline" not in result


def test_kernel_tests_are_there():
    assert all((SCRIPT.parents[1] / path).is_file() for path in gpu_check.KERNEL_TESTS)


def test_failed_tests_are_counted(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    result = gpu_check.kernel_tests("cpu", (str(tmp_path / "test_one.py"), "--rootdir", str(tmp_path)), tmp_path)
    assert (result["exit code"], result["tests"], result["failures"], result["errors"]) == (1, 2, 1, 0)
    assert any("test_bad" in line for line in result["log"])
    assert not result["passed"]


@pytest.mark.parametrize("body", ["pass", "pytest.skip('no GPU')"])
def test_the_gpus_own_tests_must_run(tmp_path, body):
    (tmp_path / "test_gpu.py").write_text(f"import pytest\ndef test_race(): {body}\n")
    result = gpu_check.kernel_tests("cuda", (str(tmp_path / "test_gpu.py"), "--rootdir", str(tmp_path)), tmp_path)
    assert result["exit code"] == 0 and result["passed"] == (body == "pass")
    assert result["skipped because"] == ([] if body == "pass" else ["no GPU"])
