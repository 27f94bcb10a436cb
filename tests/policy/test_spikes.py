"""optimizer.spike: which gradient norms are spikes, and that all ranks do the same."""

import json

import numpy as np
import pytest
import torch
from rank_cases import run_cases, settings

from dynamo_megatron.config import SpikeConfig
from dynamo_megatron.policy.spikes import GradientSpike, Spikes
from dynamo_megatron.types import Sequences

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


def test_a_resumed_run_decides_as_the_straight_one():
    norms = [1.0, 3.0, 2.0, 1.0, 1.0, 9.0, 8.1, 1.0, 0.5, 20.0]
    straight, first, second = Spikes(RULE), Spikes(RULE), Spikes(RULE)
    begun = found(first, norms[:6])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + found(second, norms[6:]) == found(straight, norms)


SCALES = (1.0, 1.0, 1.0, 50.0, 1.0, 1.0)  # of the examples' weights, and so of the gradient


def on_rank(case, config, layout) -> dict:
    """Updates of which one has a gradient that is larger than those before it."""
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.policy import Policy

    spec, lengths = load_model_config(config.model.path), np.array([9, 12, 7])
    tokens = np.random.default_rng(0).integers(5, 90, lengths.sum())
    batch = Sequences(["a", "b", "c"], tokens, np.append(0, np.cumsum(lengths)), np.array([3, 3, 3]))

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]

    policy, rows = Policy(spec, config, layout), []
    for scale in SCALES:
        before = weights()
        result = policy.fit(batch, np.full(3, 0.01 * scale), 1e-3)
        moved = any(not torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
        rows.append((result["grad_norm"], "spike" in result, moved))
    skipped, policy = weights(), Policy(spec, config, layout)
    for _ in range(SCALES.count(1.0)):
        policy.fit(batch, np.full(3, 0.01), 1e-3)
    found = {"rows": rows, "equal": all(map(torch.equal, skipped, weights()))}
    case["config"]["optimizer"]["spike"]["action"] = "stop"
    policy = Policy(spec, type(config).model_validate(case["config"]), layout)
    try:
        for scale in SCALES:
            policy.fit(batch, np.full(3, 0.01 * scale), 1e-3)
    except GradientSpike as spike:
        found["stopped"] = str(spike)
    return found


@pytest.mark.full
def test_every_rank_skips_a_spike_as_if_it_had_not_been_or_stops(tiny_model, tmp_path):
    """Adam's state too: the run goes on bit for bit as one without the spike."""
    config = settings(tiny_model, {"pp": 2}, optimizer={"spike": {"above": 1.5, "window": 3}})
    ((first, second),) = run_cases(__file__, [{"config": config, "ranks": 2}], tmp_path)
    assert [row[1] for row in first["rows"]] == [number == 3 for number in range(6)]
    assert [row[2] for row in first["rows"]] == [number != 3 for number in range(6)]
    assert second["rows"] == first["rows"] and first["equal"] and second["equal"]
    assert first["stopped"] == second["stopped"] and "(optimizer.spike)" in first["stopped"]
