"""What tests of checkpoints share: the cases of checkpoint_runs.py, and how far two exported models are apart."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open


def settings(model: Path, parallel: dict, dtype: str = "float32") -> dict:
    return {
        "model": {"path": str(model), "dtype": dtype},
        "data": {"source": "none"},
        "output_dir": "none",
        "parallel": parallel,
        "optimizer": {"eps": 1e-6, "warmup_steps": 0},
        "trainer": {"micro_batch_tokens": 64},
    }


def launch(run_script: Callable, groups: dict[str, list[dict]], folder: Path) -> None:
    """Runs cases by ranks ("NAME-RANKS")."""
    for cases in groups.values():
        for case in cases:
            Path(case["out"]).mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    run_script(Path(__file__).with_name("checkpoint_runs.py"), groups, folder, 1500)


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
