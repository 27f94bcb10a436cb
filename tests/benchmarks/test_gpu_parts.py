import json
import os
import subprocess
import sys

import device
import live_steps
import pytest
import torch
import training_beside_peers
import training_steps
from training_steps import TINY


def test_a_part_that_fails_hangs_or_lacks_something_stops_no_other(monkeypatch, capsys, tmp_path):
    (tmp_path / "parts.py").write_text(
        "import json, pathlib, sys, time\n"
        "name, folder = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "time.sleep(3600 * (name == 'head'))\n"
        "(folder / 'result.json').write_text(json.dumps({'said': ['fast']}))\n"
        "(folder / 'out' / 'events.json.gz').write_bytes(bytes(10))\n"
        "sys.exit(int(name == 'probe'))\n"
    )
    monkeypatch.setattr(device, "HERE", tmp_path)
    monkeypatch.setitem(device.PARTS, "head", device.Part(1.0, 0.0))
    monkeypatch.setitem(device.PARTS, "tests", device.Part(100.0, 0.0, ("no_such_module",)))
    words = ["device.py", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--seconds", "100000"]
    monkeypatch.setattr(sys, "argv", words)
    if not torch.cuda.is_available():
        assert device.main() == 2 and capsys.readouterr().err.startswith("gpu-check: needs a GPU")
    monkeypatch.setattr(sys, "argv", [*words, "probe,head,tests,syncs", "--tiny"])
    assert device.main() == 1
    found = json.loads((tmp_path / "out" / "device.json").read_text())
    assert [found[name].get("exit code") for name in ("probe", "head", "tests", "syncs")] == [1, None, None, 0]
    assert "no no_such_module" in found["tests"]["left out"]
    assert found["syncs"]["figures"] == {"said": ["fast"]} and "  fast\n" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"device.json", "logs.txt", "events.json.gz"}
    monkeypatch.setattr(sys, "argv", [*words, "syncs", "--tiny", "--resume"])
    assert device.main() == 0 and "syncs: " not in capsys.readouterr().out


def test_peers_must_have_our_loss():
    for dtype, off, said in (("float32", 2e-5, ["trl"]), ("float32", 5e-6, []), ("bfloat16", 1.0, [])):
        ours, theirs = ({"loss": [0.0], "gradient norm": [norm]} for norm in (2.0, 2.0 + 2 * off))
        lines = training_beside_peers.wrong_with({"ours": ours, "trl": theirs, "verl": {"skipped": "none"}}, dtype)
        assert [line.partition(":")[0] for line in lines] == said


def test_flops_are_those_of_the_products():
    """A model of one layer, product by product: 2 m n k each; attention sees half of a sequence in the mean."""
    work = training_steps.Work(1, 8, 16, 2, 1, 32, "float32", 1, 2, 3, (3, 5), 64)
    total = 0
    for n in (5, 7):  # tokens that go through the model
        projections = 2 * n * 8 * (8 + 4 + 4) + 2 * n * 8 * 8
        mlp = 3 * 2 * n * 8 * 16
        attention = 2 * (2 * n * n * 8) / 2
        total += projections + mlp + attention + 2 * n * 8 * 32
    assert work.forward_flops == total


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_every_part_at_tiny_size(tmp_path):
    """Under KIT_PYTHON, with a GPU machine's versions and the rest from .kit, or else under this interpreter."""
    python = os.environ.get("KIT_PYTHON", sys.executable)
    words = ["--tiny", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    done = subprocess.run([python, "-P", device.__file__, "all", *words], capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads((tmp_path / "out" / "device.json").read_text())
    assert list(result) == list(device.PARTS)
    left_out = {name for name, entry in result.items() if "left out" in entry}
    assert left_out <= (set() if "KIT_PYTHON" in os.environ else {"training_te", "trace_te"})
    figures = {name: entry["figures"] for name, entry in result.items() if name not in left_out}
    assert figures["tests"]["tests"] > figures["tests"]["failures"] == 0
    assert len(figures["beside-peers"]["contenders"]["ours"]["loss"]) == TINY.steps
    training = figures["training"]
    assert [step["step"] for step in training["steps"]] == [1, 2, 3] and training["tokens a step"] == sum(TINY.lengths)
    assert figures["trace"]["operators"]["aten::view"] > 0
    for way in live_steps.WAYS:
        assert len(figures[way]["steps"]) == live_steps.STEPS and figures[way]["wrong"] == []
        assert all(0 < s["push seconds"] < s["seconds"] and s["gap"] < 1e-4 for s in figures[way]["steps"])
    assert figures["live-turns"]["headline"]["memory seconds"] > 0 and figures["live-ranks"]["ranks"] == 2
    assert [len(figures[name]["metrics"]) for name in ("demo", "small-dynamo", "small-grpo")] == [3, 2, 2]
    dp, tp2 = (figures["layouts"]["layouts"][name] for name in ("dp", "tp2"))
    assert dp["headline"]["gradient norm"] == pytest.approx(tp2["headline"]["gradient norm"], rel=1e-3)
    assert {"head.md", "longest.md", "trace.events.json.gz"} <= {file.name for file in (tmp_path / "out").iterdir()}


LIVE_STEP = {"gap": 0.01, "rejected": 0, "memory seconds": 0.1}


@pytest.mark.parametrize(
    ("way", "change", "said"),
    [
        ("live-memory", {"memory seconds": None}, None),
        ("live-disk", {"gap": float("nan")}, "gap nan is above"),
        ("live-memory", {"rejected": 2.0}, "2 rollouts rejected"),
        ("live-turns", {"memory seconds": 0.0}, "no memory was released"),
    ],
)
def test_what_a_live_step_must_be(way, change, said):
    steps = [{**LIVE_STEP, **change, "step": i + 1} for i in range(live_steps.STEPS)]
    found = live_steps.wrong_with(way, steps)
    assert all(said in line for line in found) and len(found) == live_steps.STEPS if said else found == []
    assert live_steps.wrong_with(way, []) == [f"0 steps of {live_steps.STEPS}"]
