"""optimizer.spike: which gradient norms are spikes, and that all ranks do the same."""

import json
from pathlib import Path

import pytest

from dynamo_megatron.config import SpikeConfig
from dynamo_megatron.policy.spikes import Spikes

RULE = SpikeConfig(above=4.0, window=5)


def found(spikes: Spikes, norms: list[float]) -> list[bool]:
    return [spikes.observe(norm) is not None for norm in norms]


def test_a_norm_above_the_multiple_of_the_median_is_one():
    spikes = Spikes(RULE)
    assert found(spikes, [1.0, 1.0, 2.0, 1.0, 1.0, 4.0, 4.1, 1.0]) == [False] * 6 + [True, False]
    said = Spikes(RULE)
    found(said, [2.0] * 5)
    assert said.observe(9.0) == (
        "gradient norm 9 is above 4 times the median of the last 5 updates, 2 (optimizer.spike)"
    )


def test_none_is_one_before_the_window_is_full_and_updates_without_gradient_do_not_count():
    assert not any(found(Spikes(RULE), [1.0, 1.0, 1.0, 1.0, 1000.0]))
    spikes = Spikes(RULE)
    assert not any(found(spikes, [0.0] * 20)) and not any(found(spikes, [1.0] * 5)) and found(spikes, [5.0]) == [True]


def test_gradients_that_stay_large_are_taken_after_half_a_window():
    spikes = Spikes(RULE)
    assert found(spikes, [1.0] * 5 + [100.0] * 5) == [False] * 5 + [True, True, True, False, False]


def test_a_resumed_run_decides_as_the_straight_one():
    norms = [1.0, 3.0, 2.0, 1.0, 1.0, 9.0, 8.1, 1.0, 0.5, 20.0]
    straight, first, second = Spikes(RULE), Spikes(RULE), Spikes(RULE)
    begun = found(first, norms[:6])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + found(second, norms[6:]) == found(straight, norms)
    with pytest.raises(ValueError, match="no list of gradient norms"):
        second.load_state_dict({"norms": ["1"]})


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "stages"])
def ranks(request, tiny_model, run_script, tmp_path_factory) -> list[dict]:
    """What the ranks of spike_runs.py have found."""
    out = tmp_path_factory.mktemp("spikes")
    config = {
        "model": {"path": str(tiny_model), "dtype": "float32"},
        "data": {"source": "none"},
        "output_dir": "none",
        "parallel": {"pp": request.param},
        "optimizer": {"spike": {"above": 1.5, "window": 3}},
    }
    case = {"config": config, "ranks": request.param, "out": str(out)}
    run_script(Path(__file__).with_name("spike_runs.py"), [case], out, 200)
    return [json.loads(file.read_text()) for file in sorted(out.glob("rank*.json"))]


@pytest.mark.full
def test_a_skipped_update_leaves_weights_and_optimizer_as_they_are_on_every_rank(ranks):
    for found in ranks:
        assert found["norms"] == ranks[0]["norms"]
        spike = found["norms"].index(max(found["norms"]))
        assert spike == 3 and found["spikes"] == [number == spike for number in range(6)]
        assert found["moved"] == [number != spike for number in range(6)]
        assert found["optimizer steps"] == [1, 2, 3, 3, 4, 5]


@pytest.mark.full
def test_the_updates_are_those_of_a_run_without_the_spike(ranks):
    assert all(found["equal to a run without it"] for found in ranks)


@pytest.mark.full
def test_stop_ends_every_rank_with_the_reason(ranks):
    for found in ranks:
        assert found["stopped"] == ranks[0]["stopped"] and "(optimizer.spike)" in found["stopped"]
