"""Every method of configs/methods on one rank in two packings, and on two ranks as TP2 and as DP2: the same update."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

METHODS = Path(__file__).parents[2] / "configs" / "methods"
# `micro_batch` scope: the published behaviour, which depends on the packing.
NAMES = sorted(path.stem for path in METHODS.glob("*.yaml") if path.stem != "dynamo_published")
# The tiny model's logprobs lie close together and a mini-batch has some 200 tokens; both would select next to nothing.
ENOUGH = {"clip_cov": {"ratio": 0.05, "low": 0.0}, "kl_cov": {"ratio": 0.05}}
# Bounds that hold some and let some pass, before the first update and after it.
BOUNDS = {"token": {"low": 0.2, "high": 1.3}, "sequence": {"low": 1e-9, "high": 1e3}}
CORRECTIONS = {
    f"{kind}_{level}": {"kind": kind, "level": level, **BOUNDS[level]}
    for kind in ("truncate", "mask")
    for level in ("token", "sequence")
}

pytestmark = pytest.mark.full

_spec = importlib.util.spec_from_file_location("test_layouts", Path(__file__).with_name("test_layouts.py"))
layouts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layouts)
models = layouts.models


def method(name: str) -> dict:
    """Its algorithm section, with two updates a step, so that the second one has ratios."""
    if name in CORRECTIONS:
        return method("grpo") | {"rollout_correction": CORRECTIONS[name]}
    algorithm = yaml.safe_load((METHODS / f"{name}.yaml").read_text())["algorithm"]
    algorithm["loss"] |= {"mini_batches": 2, **{k: v for k, v in ENOUGH.items() if k in algorithm["loss"]}}
    return algorithm


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    one, two = [], []
    for name in (*NAMES, *CORRECTIONS):
        for cases, label, parallel, budget in (
            (one, "one", {}, 400),
            (one, "budget", {}, 100),
            (two, "tp2", {"tp": 2}, 100),
            (two, "dp2", {}, 100),
        ):
            config = layouts.case_config(models["qwen2"], parallel, budget, **method(name))
            cases.append({"config": config, "out": str(folder / f"{name}-{label}")})
    layouts.launch(one, 1, folder / "one-rank")
    layouts.launch(two, 2, folder / "two-ranks")
    return folder


@pytest.mark.parametrize("other", ["budget", "tp2", "dp2"])
@pytest.mark.parametrize("name", [*NAMES, *CORRECTIONS])
def test_the_update_does_not_depend_on_the_partition(runs, name, other):
    found = layouts.differences(runs / f"{name}-one", runs / f"{name}-{other}")
    print(name, other, found)
    assert max(found.values()) <= layouts.TOLERANCE, found


@pytest.mark.parametrize("name", [n for n in (*NAMES, *CORRECTIONS) if n != "grpo"])
def test_it_is_not_the_update_of_grpo(runs, name):
    found = layouts.differences(runs / "grpo-one", runs / f"{name}-one")
    assert found["weights"] > 3 * layouts.TOLERANCE, found
    if name in ("fork_tokens", "clip_cov", "kl_cov"):
        updates = json.loads((runs / f"{name}-one" / "result.json").read_text())["updates"]
        assert all(u["selected"] >= 5 for step in updates for u in step)
