"""Every method of configs/methods in another packing, as TP2, DP2 and CP2: the same update as one process.

The ratios of responses, whose sums are over ranks, also as CP2xTP2+SP."""

import json
from pathlib import Path

import layout_guard as guard
import pytest
import yaml
from layout_guard import Row

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
OTHERS = {"sequence_mean": {"modulation": {"expectation": "sequence_mean", "tau": 0.5}}}  # whole sequences: not with CP
LAYOUTS = ("1", "TP2", "DP2", "CP2")
# A ratio of a response, a factor of the gradient, has the rounding of the sum of its logprobs: as TP2 3e-5 nats in the
# second pass, where the gradient norm differs by up to 1.3e-5. In the first update it differs by 1e-6.
OF_RESPONSES = ("rloo", "truncate_sequence", "mask_sequence")

pytestmark = pytest.mark.full


def method(name: str) -> dict:
    """Its algorithm section, with two updates a step, so that the second one has ratios. The rollouts are made up:
    nothing that decides how many are sampled is part of it."""
    if name in CORRECTIONS:
        return method("grpo") | {"rollout_correction": CORRECTIONS[name]}
    if name in OTHERS:
        return method("grpo") | OTHERS[name]
    algorithm = yaml.safe_load((METHODS / f"{name}.yaml").read_text())["algorithm"]
    algorithm = {key: section for key, section in algorithm.items() if key not in ("allocation", "sequential")}
    algorithm["loss"] |= {"mini_batches": 2, **{k: v for k, v in ENOUGH.items() if algorithm["loss"][k]}}
    return algorithm


PAIRS = [
    (name, layout)
    for name in (*NAMES, *CORRECTIONS, *OTHERS)
    for layout in LAYOUTS
    if name not in OTHERS or layout != "CP2"
] + [("rloo", "CP2xTP2+SP"), ("gspo", "CP2xTP2+SP")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    models = guard.make_models(folder / "models")
    cases = []
    for name in (*NAMES, *CORRECTIONS, *OTHERS):
        cases.append(guard.reference_case(models, folder, "qwen2", out=name, algorithm=method(name)))
    of_tokens = method("rloo")
    of_tokens["loss"] |= {"ratio": "token"}
    cases.append(guard.reference_case(models, folder, "qwen2", out="rloo_of_tokens", algorithm=of_tokens))
    for name, layout in PAIRS:
        out = f"{name}-{layout}"
        cases.append(guard.case(models, folder, Row("qwen2", layout), out=out, algorithm=method(name)))
    guard.launch(cases, folder / "launch")
    return folder


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_the_update_does_not_depend_on_the_partition(runs, name, layout):
    found = guard.gaps(runs / name, runs / f"{name}-{layout}")
    print(name, layout, found)
    if name in OF_RESPONSES:
        assert found.pop("grad_norm") < 2e-5
    if name == "rloo":  # its loss has that factor, too
        assert found.pop("loss") < 1e-4
    assert not guard.beyond(Row("qwen2", layout), found), found


@pytest.mark.parametrize("name", [n for n in (*NAMES, *CORRECTIONS, *OTHERS) if n != "grpo"])
def test_it_is_not_the_update_of_grpo(runs, name):
    found = guard.gaps(runs / "grpo", runs / name)
    assert found["weights"] > 3e-5, found
    if name in ("fork_tokens", "clip_cov", "kl_cov"):
        updates = json.loads((runs / name / "result.json").read_text())["updates"]
        assert all(u["selected"] >= 5 for u in updates)


def test_a_response_s_ratio_is_not_its_tokens_ratios(runs):
    """The second of the two updates has ratios; the first one, where they are 1, is the same."""
    found = guard.gaps(runs / "rloo_of_tokens", runs / "rloo")
    assert found["weights"] > 3e-5 and found["gradients"] < 1e-5, found
