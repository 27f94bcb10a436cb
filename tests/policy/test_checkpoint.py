"""A checkpoint under every layout: the step after a load is the step that a straight run takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

TOLERANCE = 1e-5
SAVED = {"tp": 2, "pp": 2}
LAYOUTS = {"same": SAVED, "tp4": {"tp": 4}, "pp4": {"pp": 4}, "dp4": {}, "tp1": {}}


def settings(model: Path, parallel: dict) -> dict:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "none"},
        "output_dir": "none",
        "parallel": parallel,
        "optimizer": {"eps": 1e-6, "warmup_steps": 0},
        "trainer": {"micro_batch_tokens": 64},
    }


def launch(groups: dict[str, list[dict]], folder: Path) -> None:
    """Runs cases by ranks ("NAME-RANKS")."""
    for cases in groups.values():
        for case in cases:
            Path(case["out"]).mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(groups))
    script = Path(__file__).with_name("checkpoint_runs.py")
    with open(folder / "log", "w") as log:
        code = subprocess.run(
            [sys.executable, "-P", str(script), str(folder / "cases.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=400,
        ).returncode
    assert code == 0, (folder / "log").read_text()[-6000:]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    return found


def difference(a: Path, b: Path) -> float:
    """The largest over tensors of norm of the difference over norm."""
    a, b = weights_of(a / "hf"), weights_of(b / "hf")
    assert a.keys() == b.keys() and len(a) > 40
    return max(float((w.double() - b[n].double()).norm() / w.double().norm()) for n, w in a.items())


@pytest.fixture(scope="module")
def model(make_tiny_model, tmp_path_factory) -> Path:
    """Its vocabulary is padded to another size under every tensor-parallel size."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", layers=4, kv_heads=4, vocab=104)


@pytest.fixture(scope="module")
def runs(model, make_tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")

    def case(name: str, parallel: dict, **more) -> dict:
        return {"config": settings(model, parallel), "out": str(folder / name), **more}

    four = [case("straight", SAVED)]
    for name in ("same", "tp4", "pp4", "dp4"):
        for kind in ("sync", "async"):
            four.append(case(f"{name}-{kind}", LAYOUTS[name], load=str(folder / "straight" / kind / "step-000003")))
    one = [case("tp1-sync", {}, load=str(folder / "straight" / "sync" / "step-000003"))]
    other = make_tiny_model(folder / "other-model", layers=4, kv_heads=4, vocab=104, ffn=96)
    refused = case("other", {}, load=str(folder / "straight" / "sync" / "step-000003"), refused=True)
    one.append({**refused, "config": settings(other, {})})
    launch({"ranks-4": four, "ranks-1": one}, folder / "launch")
    return folder


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("layout", ["tp4", "pp4", "dp4"])
def test_another_layout_goes_on_where_the_run_stopped(runs, layout, kind):
    found = difference(runs / "straight", runs / f"{layout}-{kind}")
    print(layout, kind, found)
    assert found <= TOLERANCE


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_same_layout_goes_on_bit_for_bit(runs, kind):
    assert difference(runs / "straight", runs / f"same-{kind}") == 0


def test_one_rank_goes_on_where_four_stopped(runs):
    assert difference(runs / "straight", runs / "tp1-sync") <= TOLERANCE


def test_a_checkpoint_of_another_model_is_refused(runs):
    said = (runs / "other" / "refused.txt").read_text()
    assert said.endswith("is a checkpoint of another model: ffn_hidden_size 128 instead of 96")
