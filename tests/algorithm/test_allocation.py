import json
from functools import partial

import numpy as np
import pytest

from dynamo_megatron.algorithm import success
from dynamo_megatron.algorithm.allocation import RolloutAllocator, success_variance, waterfill
from dynamo_megatron.algorithm.history import MEASURES, REWARDS
from dynamo_megatron.config import AllocationConfig


def observe(allocator, outcomes, step=1):
    """outcomes: prompt -> (successes, trials)."""
    ids = [i for i, (_, g) in outcomes.items() for _ in range(g)]
    flags = np.array([j < k for k, g in outcomes.values() for j in range(g)])
    allocator.observe(ids, flags.astype(float), flags, step)


def numbers(allocator, prompt_id, names=REWARDS):
    """[trials, successes, reward mean, sum of squared deviations] of a prompt."""
    state = allocator.state_dict()
    return [state[name][state["prompt_ids"].index(prompt_id)] for name in names]


# [right rollouts of known energy, its sum, wrong ones, its sum] of a prompt
measures = partial(numbers, names=MEASURES)


def test_resume_through_json_is_exact():
    def run(steps, state=None):
        allocator = RolloutAllocator(AllocationConfig(variance="empirical"))
        if state is not None:
            allocator.load_state_dict(json.loads(state))
        counts = []
        for step in steps:
            rng = np.random.default_rng(step)
            ids = [f"p{i}" for i in rng.choice(30, 16, replace=False)]
            n = allocator.allocate(ids, 130, step=step)
            counts.append(n.tolist())
            who = np.repeat(ids, n)
            success_ = rng.uniform(size=len(who)) < np.array([int(i[1:]) / 30 for i in who])
            allocator.observe(who.tolist(), success_ * 0.7, success_, step)
        return counts, json.dumps(allocator.state_dict(), sort_keys=True)

    straight, end = run(range(12))
    _, middle = run(range(7))
    resumed, same_end = run(range(7, 12), middle)
    assert resumed == straight[7:] and same_end == end


def test_neyman_learns_who_is_mixed_and_logs_it():
    allocator = RolloutAllocator({"kind": "neyman", "variance_floor": 0.0})
    observe(allocator, {"solved": (16, 16), "mixed": (8, 16), "hopeless": (0, 16)}, step=1)
    n = allocator.allocate(["solved", "mixed", "new", "hopeless", "mixed"], 40, step=2)
    assert min(n[1], n[4]) > n[2] > max(n[0], n[3])
    rows = list(allocator.last.rows())
    assert rows[1]["prompt_id"] == "mixed" and rows[1]["step"] == 2 and rows[1]["n"] == n[1]
    assert [row["history"] for row in rows] == [True, True, False, True, True]
    assert rows[1]["variance"] > rows[2]["variance"] > rows[0]["variance"]
    json.dumps(rows)


def test_variance_floor_evens_out():
    counts = []
    for floor in (0.0, 1.0):
        allocator = RolloutAllocator({"kind": "neyman", "variance_floor": floor})
        observe(allocator, {"solved": (16, 16), "mixed": (8, 16)})
        counts.append(allocator.allocate(["solved", "mixed"], 20, step=2))
        a, b = success.beta_prior(np.array([16.0, 8.0]), np.array([16.0, 16.0]))
        bare = success.bernoulli(a + np.array([16, 8]), b + np.array([0, 8]))
        np.testing.assert_allclose(allocator.last.variance, bare + floor * bare.mean())
    assert counts[0][0] < counts[1][0] < counts[1][1] < counts[0][1]


def test_forgetting_halves_an_observation_after_its_half_life():
    allocator = RolloutAllocator({"kind": "neyman", "half_life": 3})
    observe(allocator, {"a": (8, 8), "b": (1, 4)})
    for step in range(3):
        observe(allocator, {"a": (0, 2)}, step)
    trials, successes, mean, _ = numbers(allocator, "a")
    assert successes == pytest.approx(4) and trials == pytest.approx(4 + 2 * (1 + 0.5 ** (1 / 3) + 0.5 ** (2 / 3)))
    assert mean == pytest.approx(successes / trials)
    assert numbers(allocator, "b")[:2] == [4, 1]  # its visits count, not the others'


def test_waterfill_uses_the_published_priority():
    outcomes = {"solved": (17, 20), "mixed": (8, 16), "rare": (1, 16), "never": (0, 16), "few": (1, 3)}
    k, g = np.array(list(outcomes.values())).T
    for power, exponent in (("sigma2", 1.0), ("sigma", 0.5)):
        allocator = RolloutAllocator({"kind": "waterfill", "power": power, "half_life": 1, "rollout_n_min": 4})
        observe(allocator, {"rare": (0, 8)})
        observe(allocator, {**outcomes, "rare": (1, 8)})  # 1 of 16 in two visits: nothing is forgotten
        n = allocator.allocate([*outcomes, "new"], 64, step=2)
        priority = np.append(success_variance(k, g) + 1e-6 * (1 - k / g), 0.0)
        priority[[0, 3, 4]] = 0.01, 0.01, 0  # solved, never solved, 3 rollouts
        assert n.tolist() == waterfill(np.append(g, 0), priority**exponent, 64, 4, 24, 8).tolist()
        assert n[5] == 8


def test_empirical_variance_is_shrunk_to_the_pool():
    allocator = RolloutAllocator({"kind": "neyman", "variance": "empirical", "variance_floor": 0.0})
    rng = np.random.default_rng(0)
    rewards = {"a": rng.normal(0, 1, 9), "b": rng.normal(5, 3, 5)}
    ids = [i for i, r in rewards.items() for _ in r]
    allocator.observe(ids, np.concatenate(list(rewards.values())), np.zeros(len(ids), bool), 1)
    allocator.allocate(["a", "b", "new"], 24, step=2)
    squares = [((r - r.mean()) ** 2).sum() for r in rewards.values()]
    pool = (squares[0] / 12 + squares[1] / 8) / (8 / 12 + 4 / 8)
    want = [(squares[0] + 4 * pool) / 12, (squares[1] + 4 * pool) / 8, pool]
    np.testing.assert_allclose(allocator.last.variance, want, rtol=1e-12)


def test_visits_merge_to_the_variance_of_all_rewards():
    allocator = RolloutAllocator({"kind": "waterfill"})  # forgets nothing
    rewards = np.random.default_rng(0).normal(100, 1, 30)
    for part in np.split(rewards, [3, 11]):
        allocator.observe(["a"] * len(part), part, np.zeros(len(part), bool), 1)
    assert numbers(allocator, "a") == pytest.approx([30, 0, rewards.mean(), 30 * rewards.var()])


def test_order_of_measured_rollouts_does_not_matter():
    rng = np.random.default_rng(3)
    who = np.repeat([f"p{i}" for i in range(20)], 9)
    right, energy = rng.uniform(size=180) < 0.6, rng.lognormal(size=180)
    states = []
    for order in (np.arange(180), rng.permutation(180)):
        allocator = RolloutAllocator({})
        allocator.observe(who[order].tolist(), right[order] * 1.0, right[order], 1, energy[order])
        states.append(allocator.state_dict())
    assert states[0] == states[1]


def test_energies_are_summed_of_what_was_measured_and_forgotten_like_the_rewards():
    allocator = RolloutAllocator({"half_life": 1})
    ids, right = ["a", "a", "b", "a"], np.array([True, False, True, True])
    allocator.observe(ids, right * 1.0, right, 1, energy=[1.5, 4.0, 7.0, 2.5])
    assert measures(allocator, "a") == [2, 4.0, 1, 4.0] and measures(allocator, "b") == [1, 7.0, 0, 0]
    allocator.observe(["a", "a"], [0.0, 1.0], [False, True], 2)
    assert numbers(allocator, "a")[:2] == [3.5, 2.0], "the rollouts count"
    assert measures(allocator, "a") == [1, 2.0, 0.5, 2.0], "their energies are not known"
    allocator.observe(["a"], [1.0], [True], 3, energy=np.array([-1e-4], np.float32))
    assert measures(allocator, "a") == [1.5, 1.0, 0.25, 1.0], "rounding below 0 is 0"


@pytest.mark.parametrize(("kind", "budget", "counts"), [("clip", 49, [24, 24]), ("scale", 4, [2, 2])])
def test_a_budget_beyond_the_bounds_keeps_to_them_or_moves_them(kind, budget, counts):
    allocator = RolloutAllocator({"kind": "neyman", "on_shortfall": kind, "rollout_n_min": 8})
    assert allocator.allocate(["a", "b"], budget, step=1).tolist() == counts


def test_a_state_is_not_changed_by_later_steps():
    """A checkpoint may be asked for in the middle of the next step, of which the allocator has observed rollouts."""
    allocator = RolloutAllocator({})
    observe(allocator, {"a": (1, 4), "b": (2, 4)})
    state, plain = allocator.history.state_dict(), allocator.state_dict()
    observe(allocator, {"a": (3, 4)}, step=2)
    observe(allocator, {"a": (3, 4), "c": (1, 4)}, step=3)
    assert {name: list(state[name]) for name in plain} == plain != allocator.state_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["x", "bad"], [0.0, np.nan], [False, False], 3), "'bad'.*nan"),
        ((["bad", "bad"], [1e200, -1e200], [False, False], 3), "'bad'"),  # their squares are infinite
        ((["x", "bad"], [0.0, 1.0], [0, 2], 3), "'bad'.*2"),
        ((["x", "bad"], [0.0, 1.0], [0, 1], 3, [1.0, -1.0]), "energy: prompt 'bad' has -1.0"),
    ],
)
def test_bad_observations_name_the_prompt_and_change_nothing(arguments, message):
    allocator = RolloutAllocator({})
    with pytest.raises(ValueError, match=message):
        allocator.observe(*arguments)
    assert allocator.state_dict() == RolloutAllocator({}).state_dict()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trials": [4, 0]}, "prompt 'fine': its statistics contradict each other: trials 0"),
        ({"trials": [4, np.nan]}, "prompt 'fine'"),
        ({"successes": [1, 5]}, "prompt 'fine'"),
        ({"energy_right_trials": [0, 2]}, "prompt 'fine'"),
        ({"trials": [2]}, "state: prompt_ids is not"),
        ({"trials": ["a", "b"]}, "state: prompt_ids is not"),
        ({"prompt_ids": ["a", "a"]}, "state: prompt_ids is not"),
        ({"prompt_ids": "ab"}, "state: prompt_ids is not"),
    ],
)
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(change, says):
    allocator = RolloutAllocator({})
    observe(allocator, {"fine": (1, 4), "bad": (1, 4)})
    before = allocator.state_dict()
    with pytest.raises(ValueError, match=says):
        allocator.load_state_dict({**before, **change})
    with pytest.raises(ValueError, match="state: no trials"):
        allocator.load_state_dict({"prompt_ids": []})
    assert allocator.state_dict() == before
