"""The noise of the gradient that an update measures is that of its rollouts' gradients, in every layout."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from dynamo_megatron.algorithm.gradient_noise import Noise, Split

pytestmark = pytest.mark.full
LAYOUTS = {
    "1": (1, {}),
    "DP2": (2, {}),
    "DP2 overlapped": (2, {}),
    "TP2": (2, {"tp": 2}),
    "TP2+SP": (2, {"tp": 2, "sequence_parallel": True}),
    "VPP2xPP2": (2, {"pp": 2, "vpp": 2}),
}


@pytest.fixture(scope="module")
def found(run_script, tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("noise")
    make = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "tiny_model.py"))["make_tiny_model"]
    # qwen3: it has norms of queries and keys, whose gradients tensor-parallel ranks share in a way of their own.
    model = make(out / "model", family="qwen3", layers=4, hidden=64, heads=8, kv_heads=4, dtype="float32")
    cases = []
    for name, (ranks, parallel) in LAYOUTS.items():
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"source": "none"},
            "output_dir": "none",
            "parallel": parallel,
            "rollout": {"max_new_tokens": 32},
            "algorithm": {"modulation": None},
            "optimizer": {"eps": 1e-6, "warmup_steps": 0},
            "trainer": {"micro_batch_tokens": 80},
        }
        overlap = name.endswith("overlapped")
        cases.append({"config": config, "ranks": ranks, "overlap": overlap, "out": str(out / name)})
    run_script(Path(__file__).with_name("noise_runs.py"), cases, out, 500)
    return {name: json.loads((out / name / "found.json").read_text()) for name in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_noise_is_that_of_the_rollouts_gradients(found, layout):
    fields = {k: np.array(v) if isinstance(v, list) else v for k, v in found[layout]["split"].items()}
    split, products = Split(**fields), np.array(found["1"]["products"])
    assert split.parts == (2 if layout.startswith("DP2") else 3)
    squares = [
        sum(
            products[np.ix_(mine, mine)].sum()
            for mine in ((split.rank == rank) & (split.part <= last) for rank in range(split.rank.max() + 1))
        )
        for last in (0, 1)
    ]
    expected, measured = split.noise(squares, products.sum()), Noise.of(found[layout]["measured"])
    scale = products.sum()
    assert (measured.signal, measured.between, measured.within) == pytest.approx(
        (expected.signal, expected.between, expected.within), rel=1e-4, abs=1e-4 * scale
    )
    assert abs(measured.within) > 1e-2 * scale
    assert products.diagonal().max() < 0.5 * products.trace()  # not of one rollout alone


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_measured_update_is_an_update(found, layout):
    """Only the order of its sums is another."""
    plain, measured = (found[layout][name] for name in ("plain", "measured"))
    assert Noise.of(plain) is None
    assert {k: v for k, v in measured.items() if "gradient_noise" not in k} == pytest.approx(plain, rel=1e-5, abs=1e-7)
    for after in (found[layout]["after True"], found[layout]["after False"]):
        np.testing.assert_allclose(after, found["1"]["after False"], atol=1e-3)


def test_statistics_that_fail_know_whether_their_mini_batches_are_measured(found):
    """`replay --step` packs them the same way."""
    for of_layout in found.values():
        assert (of_layout["inputs True"], of_layout["inputs False"]) == (True, False)
