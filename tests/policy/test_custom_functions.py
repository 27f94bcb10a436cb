"""A loss and an advantage of the user's make the update of the built-in ones that they repeat; wrong ones are named."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

LAYOUTS = {"TP1": {}, "TP2": {"tp": 2}, "CP2": {"cp": 2}}
SHORT = ("2 mini-batches", "KL added")  # of the pairs: those of layouts but TP1
GRPO = {
    "advantage": {"kind": "grpo"},
    "modulation": None,
    "loss": {"aggregation": "token_mean", "mini_batches": 2},
}
KL = {"coef": 0.1, "kind": "k3"}


def changed(algorithm: dict, **sections) -> dict:
    return {**algorithm, **{name: {**(algorithm.get(name) or {}), **keys} for name, keys in sections.items()}}


def pair(algorithm: dict, function: str = "grpo", **sections) -> list[dict]:
    """With the built-in loss and with `function`, and with `sections` for that one alone."""
    return [algorithm, changed(algorithm, loss={"kind": f"own_functions:{function}"}, **sections)]


before_the_loss = changed(
    GRPO,
    advantage={"entropy_shaping": {}, "overlong_buffer": 0.5, "positive_weight": 0.5},
    loss={"entropy_top_ratio": 0.5},
    rollout_correction={"low": 0.2, "high": 1.3},
)
rloo = changed(GRPO, advantage={"kind": "rloo", "positive_weight": 0.7})
PAIRS = {
    "1 mini-batch": pair(changed(GRPO, loss={"mini_batches": 1})),
    "2 mini-batches": pair(GRPO),
    "what comes before the loss": pair(before_the_loss),
    "KL added": pair(changed(GRPO, kl=KL)),
    "KL by the function": pair(changed(GRPO, kl=KL), "grpo_with_kl", kl={"where": "function"}),
    "advantages": [rloo, changed(rloo, advantage={"kind": "own_functions:rloo"})],
}
RUNS = [(name, layout) for layout in LAYOUTS for name in (PAIRS if layout == "TP1" else SHORT)]
ONE_BATCH = changed(GRPO, loss={"mini_batches": 1, "kind": "own_functions:grpo"})
FILE = Path(__file__).with_name("own_functions.py")
NO_GRADIENT, NOT_FINITE = (
    "returned losses that have no gradient by inputs.logprobs",
    "gave a loss or derivative that is",
)
WRONG = {  # what is said after the function's name
    "nothing": "returned NoneType, not a tensor of float32 [",
    "mean": "returned float32 [] on cpu, not a tensor of float32 [",
    "ids": "returned int64 [",
    "detached": NO_GRADIENT,
    "constant": NO_GRADIENT,
    "key_error": f"failed: KeyError: 'no such table' ({FILE}, line ",
    "in_backward": "failed: RuntimeError: one of the variables needed for gradient computation has been modified",
    "nan": f"{NOT_FINITE} NaN or infinite: loss nan, gradient norm nan before the optimizer step: rank 0, prompts ",
    "nan_gradient": f"{NOT_FINITE} NaN or infinite: loss 0, gradient norm nan before the optimizer step: rank 0, "
    "prompts a, b, c",
}


@pytest.fixture(scope="module")
def results(tiny_model, run_script, tmp_path_factory) -> dict[str, list[dict]]:
    """What the ranks of each layout have found."""
    out = tmp_path_factory.mktemp("custom")
    cases = []
    for name, parallel in LAYOUTS.items():
        config = {
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "data": {"source": "none"},
            "output_dir": "none",
            "parallel": parallel,
            "rollout": {"max_new_tokens": 32},
            "optimizer": {"eps": 1e-6, "warmup_steps": 0},
            "trainer": {"micro_batch_tokens": 200},
        }
        pairs = {pair: PAIRS[pair] for pair, layout in RUNS if layout == name}
        case = {"config": config, "ranks": 2 if parallel else 1, "pairs": pairs, "algorithm": ONE_BATCH}
        cases.append({**case, "wrong": list(WRONG), "out": str(out / name)})
    run_script(Path(__file__).with_name("custom_runs.py"), cases, out, 500)
    return {
        name: [json.loads(file.read_text()) for file in sorted((out / name).glob("rank*.json"))] for name in LAYOUTS
    }


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_the_update_is_that_of_the_built_in_one(results, name, layout):
    assert len(results[layout]) == (1 if layout == "TP1" else 2)
    for found in results[layout]:
        found = found[name]
        assert found["updates"] == (2 if name == "1 mini-batch" else 4) and found["moved"] > 1e-3, found
        assert all(found[key] <= 1e-5 for key in ("weights", "loss", "grad_norm", "kl")), found
        if name == "advantages":
            assert found["equal"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_named_in_one_line_before_the_optimizer_step(results, layout, name):
    for found in results[layout]:
        said = found["wrong"][name]
        kind = "NonFiniteError" if name.startswith("nan") else "UserCodeError"
        line = f"{kind}: algorithm.loss.kind: own_functions:{name} {WRONG[name]}"
        assert said.startswith(line) and "\n" not in said, said
        assert found["wrong"]["moved"] == "0.0"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["function", "no function"])
def test_a_function_is_not_blamed_for_what_it_was_given(results, layout, name):
    for found in results[layout]:
        said = found["wrong"][f"nan advantage, {name}"]
        assert said.startswith("loss nan, gradient norm nan before the optimizer step: rank ")
        assert said.count("prompts b") == said.count("rank ") and "prompts a" not in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_without_any_gradient_is_skipped(results, layout):
    assert all(found["wrong"]["no advantage"] == "1.0" for found in results[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_that_differ_between_ranks_are_refused_on_all_of_them(results, layout):
    said = {found["wrong"]["by_rank"] for found in results[layout]}
    if layout == "TP1":
        assert said == {"nothing"}
    else:
        (line,) = said
        assert line.startswith(
            "algorithm.advantage.kind: own_functions:by_rank returned other advantages on rank 1 than on rank 0"
        )
