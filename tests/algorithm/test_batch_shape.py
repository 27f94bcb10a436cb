import json

import numpy as np
import pytest
from pydantic import ValidationError

from dynamo_megatron.algorithm.batch_shape import PATIENCE, BatchShape, expense, prefill_cost
from dynamo_megatron.algorithm.gradient_noise import Noise
from dynamo_megatron.config import Config


def config(**changes) -> Config:
    plain = {
        "model": {"path": "none"},
        "data": {"source": "none", "batch_prompts": "auto"},
        "output_dir": "none",
        "algorithm": {"allocation": {"budget": 64, "rollout_n_min": 1}, "advantage": {"kind": "history"}},
    }
    for key, value in changes.items():
        *path, name = key.split("__")
        node = plain
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return Config.model_validate(plain)


def observe(shape: BatchShape, times: int, between=1.0, within=1.0, noise=0.0) -> list[str]:
    rng = np.random.default_rng(0)
    said = []
    for _ in range(times):
        b, w = between + noise * rng.normal(), within + noise * rng.normal()
        said.append(shape.observe(Noise(0.0, b, w), prompt_tokens=100, response_tokens=300))
    return [line for line in said if line is not None]


def test_costs_by_hand():
    # A prompt is a forward pass of 100 tokens; a rollout one of 300, of 400 for the logprobs, 3 x 400 in the update.
    assert prefill_cost(100, 300) == pytest.approx(100 / 1900)
    # 8 x 8 at c = 2: (between / 8 + within / 64) x 80.
    assert expense(8, 64, 2.0) == pytest.approx([10.0, 1.25])


@pytest.mark.parametrize(
    ("cost", "between", "within", "prompts"),
    [
        (1.0, 1.0, 16.0, 16),  # n* = sqrt(16) = 4
        (4.0, 1.0, 16.0, 8),  # n* = 8, where it begins
        (4.0, 1.0, 64.0, 4),  # n* = 16
        (0.0, 1.0, 1.0, 32),  # n* = 0: as many as have two rollouts
        (0.0, 0.0, 1.0, 8),  # nothing between prompts: another shape gains nothing
        (100.0, 1.0, 100.0, 4),  # n* = 100: as few as the bounds allow
    ],
)
def test_it_comes_to_the_least_variance_times_cost(cost, between, within, prompts):
    shape = BatchShape(config(data__shape={"prompt_cost": cost}))
    assert shape.prompts == 8
    observe(shape, 6 * PATIENCE, between, within)
    assert shape.prompts == prompts


def test_changes_are_rare_and_by_a_factor_of_two():
    shape = BatchShape(config(data__shape={"prompt_cost": 0.0}))
    assert observe(shape, PATIENCE - 1) == [] and shape.prompts == 8
    (line,) = observe(shape, 1)
    assert shape.prompts == 16
    # Before: (1/8 + 1/64) x 64 = 9; then (1/16 + 1/64) x 64 = 5.
    assert line == (
        "batch shape: 16 prompts with 4 rollouts each in place of 8 with 8: the gradient's variance between prompts is "
        "1 of that of a rollout within one, a prompt costs 0 rollouts; variance times cost 0.56 of what it was"
    )
    assert observe(shape, PATIENCE - 1) == [] and len(observe(shape, 1)) == 1 and shape.prompts == 32
    assert observe(shape, 4 * PATIENCE) == []


def test_what_may_be_chance_changes_nothing():
    shape = BatchShape(config(data__shape={"prompt_cost": 0.0}))
    assert observe(shape, PATIENCE, noise=3.0) == []
    assert len(observe(BatchShape(config(data__shape={"prompt_cost": 0.0})), PATIENCE, noise=0.3)) == 1


def test_the_cost_comes_from_the_tokens_and_the_servers():
    for changes, cost in (({}, "0.053"), ({"rollout__server_args": ["--disable-radix-cache"]}, "0")):
        (line,) = observe(BatchShape(config(**changes)), PATIENCE)
        assert f"a prompt costs {cost} rollouts" in line


def test_a_resumed_run_chooses_as_the_straight_one():
    straight = BatchShape(config())
    observe(straight, PATIENCE + 3, noise=0.1)
    resumed = BatchShape(config())
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    chosen = {}
    for name, shape in (("straight", straight), ("resumed", resumed)):
        chosen[name] = [observe(shape, 1, 1.0 + i, 2.0) and shape.prompts for i in range(PATIENCE)]
    assert chosen["straight"] == chosen["resumed"] == [[]] * (PATIENCE - 4) + [32] + [[]] * 3
    assert straight.state_dict() == resumed.state_dict()


@pytest.mark.parametrize(("between", "within"), [(-5.0, 1.0), (5.0, -1.0)])
def test_nothing_changes_to_the_same_number_or_by_noise_below_0(between, within):
    shape = BatchShape(config(algorithm__allocation={"budget": 64}))
    shape.prompts = 4  # the fewest
    assert [shape.observe(Noise(0.0, between, within), 8.0, 8.0) for _ in range(PATIENCE)] == [None] * PATIENCE
    assert shape.prompts == 4


def test_a_number_stays():
    shape = BatchShape(config(data__batch_prompts=16))
    assert observe(shape, 4 * PATIENCE) == [] and shape.prompts == 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"algorithm__advantage": {"kind": "rloo"}, "algorithm__allocation": {"budget": 64}}, "kind rloo comes from"),
        ({"algorithm__advantage": {"kind": "my:function"}}, "kind my:function comes from"),
        ({"algorithm__allocation": {"budget": None}}, "data.batch_prompts: auto divides algorithm.allocation.budget"),
        ({"algorithm__allocation": {"budget": 7}}, "auto has at least 4 prompts"),
        ({"algorithm__loss": {"mini_batches": 9}}, "auto has at least 36 prompts"),
        ({"algorithm__dynamic_sampling": {}}, "set algorithm.dynamic_sampling to null"),
        (
            {"algorithm__dynamic_sampling": {}, "data__batch_prompts": 8, "data__shape": {"every": 1}},
            "set algorithm.dynamic_sampling to null",
        ),
        ({"parallel": {"cp": 2}}, "data.shape.every: with cp 2 no rank has the whole gradient"),
        ({"data__batch_prompts": 8, "data__shape": {"prompt_cost": 1}}, "data.shape.prompt_cost: an option of"),
        (
            {"algorithm__modulation": {"scope": "micro_batch"}, "kernels__gradient": "recompute"},
            "data.shape.every: with algorithm.modulation.scope micro_batch",
        ),
    ],
)
def test_what_is_refused(changes, said):
    with pytest.raises(ValidationError) as error:
        config(**changes)
    (line,) = [line for line in str(error.value).splitlines() if said in line]
    assert "; " in line


def test_reinforce_has_no_baseline_of_the_group():
    assert config(algorithm__advantage={"kind": "reinforce"}).batch_prompts == 8


def test_the_first_shape_and_the_bounds():
    assert config().prompt_bounds == (4, 32)
    wide = config(algorithm__allocation={"budget": 640, "rollout_n_min": 3, "rollout_n_max": 5})
    assert wide.prompt_bounds == (128, 213) and wide.batch_prompts == 128 and wide.rollout_budget == 640
    assert wide.prompt_stream.batch_prompts == 128


def test_when_the_noise_is_measured():
    assert [step for step in range(9) if config().measures_noise(step)] == [0, 4, 8]
    often = config(data__batch_prompts=8, data__shape={"every": 3})
    assert [step for step in range(9) if often.measures_noise(step)] == [0, 3, 6]
    assert not any(config(data__batch_prompts=8).measures_noise(step) for step in range(9))
