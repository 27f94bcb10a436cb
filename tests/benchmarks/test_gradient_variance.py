import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gradient_designs import Pool
from gradient_variance import Sketch, energy_report, stored_rollouts

from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Rollout


@pytest.fixture(scope="module")
def found(tiny_model, run_script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    case = {
        "model": {"path": str(tiny_model)},
        "data": {"source": "unused.jsonl"},
        "reward": {"functions": ["math"]},
        "algorithm": {"advantage": {"kind": "rloo"}, "modulation": None},
    }
    run_script(Path(__file__).parent / "gradient_job.py", case, folder, 240)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.full
def test_the_rollouts_gradients_make_the_updates(found):
    """Times advantage and weight they add up to the gradient of the trainer's own update."""
    assert found["sum of rollouts"] == pytest.approx(found["update"], rel=1e-4)


def test_energies(found):
    assert found["energies"][0] == pytest.approx(found["energy of the first"], rel=1e-5)


def test_rollouts_of_other_weights(found):
    assert "they are not from these weights" in found["refused"]


def test_the_sketchs_error(found):
    """Of the squared norms; about sqrt(2 / 997) in size."""
    whole, sketched = map(np.array, found["squares"])
    assert found["errors"] == pytest.approx(sketched / whole - 1, abs=1e-4)
    assert 0 < np.abs(found["errors"]).max() < 0.2


def test_a_sketch_keeps_inner_products():
    """But for an error of about sqrt(2 / 256); without signs of their own those that meet would add up to twice."""
    rng = np.random.default_rng(0)
    first, sketch = rng.random((100, 600)).astype(np.float32), Sketch(600, 256)
    second = first + rng.normal(size=first.shape).astype(np.float32)

    def sketched(rows):
        return np.stack(
            [sketch([torch.from_numpy(r[:400]).view(20, 20), torch.from_numpy(r[400:])]).copy() for r in rows]
        )

    products = (sketched(first) * sketched(second)).sum(1)
    assert products.mean() == pytest.approx((first * second).sum(1).mean(), rel=0.2)


def stored(folder: Path, rewards: dict[str, str]) -> Path:
    """A run whose prompts have these rewards, the last rollout of each stored first."""
    store, most = RolloutStore(folder), max(map(len, rewards.values()))
    for j in reversed(range(most)):
        for i, (name, values) in enumerate(rewards.items()):
            if j < len(values):
                ids = (f"000001-{i:04}-{j:03}", f"000001-{i:04}", name, 1)
                right = values[j] == "1"
                store.append(Rollout(*ids, [1, 2], [0, 1], [-1.0], [(0, 0, 1)], "stop", float(right), right, {}))
    store.close()
    return folder


def test_the_rollouts_of_a_run(tmp_path):
    """Prompts and their rollouts by name; of those with three rollouts, `mixed` leaves those that have both rewards
    among them."""
    run = stored(tmp_path, {"d": "0110", "b": "000", "c": "111", "a": "100", "e": "10"})

    def taken(*arguments) -> dict[str, list[float]]:
        batch = stored_rollouts(run, *arguments)
        return {p: batch.rewards[[q == p for q in batch.prompt_ids]].tolist() for p in batch.prompt_ids}

    everything = {"a": [1, 0, 0], "b": [0, 0, 0], "c": [1, 1, 1], "d": [0, 1, 1]}
    assert taken(None, 3) == everything and list(taken(None, 3)) == list("abcd")
    assert list(taken(3, 3)) == list("abc") and list(taken(2, 3, True)) == ["a", "d"]
    with pytest.raises(ValueError, match="1 prompts with 4 rollouts of different rewards in step 1; sample more"):
        taken(None, 4, True)


def test_energy_and_norms():
    """Wrong rollouts of 3 tokens have twice the energy of right ones, those of 5 tokens four times."""
    rewards, lengths = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([3, 3, 5, 5])
    energy = np.array([[1.0, 2.0], [1.0, 4.0]])
    gradients = np.sqrt(3 * energy)[..., None]
    report = energy_report(Pool.of(gradients, rewards, energy), lengths)
    assert report["log-correlation"] == pytest.approx(1)
    rows = {tuple(r["tokens"]): (r["S0/S1"], r["|g|^2 of wrong over right"]) for r in report["wrong over right"]}
    assert rows == {(3, 5): (3.0, pytest.approx(3)), (3, 3): (2.0, pytest.approx(2)), (5, 5): (4.0, pytest.approx(4))}
