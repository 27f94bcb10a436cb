import json

import numpy as np
import pytest

from dynamo_megatron.algorithm import success
from dynamo_megatron.algorithm.allocation import RolloutAllocator, success_variance, waterfill
from dynamo_megatron.config import AllocationConfig

CONFIGS = [
    {"kind": "uniform"},
    {"kind": "waterfill", "power": "sigma2"},
    {"kind": "waterfill", "power": "sigma"},
    {"kind": "neyman", "variance_floor": 0.0},
    {"kind": "neyman", "variance": "surprise"},
    {"kind": "neyman", "variance": "empirical"},
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))


def observe(allocator, outcomes, step=1):
    """outcomes: prompt -> (successes, trials)."""
    ids = [i for i, (_, g) in outcomes.items() for _ in range(g)]
    flags = np.array([j < k for k, g in outcomes.values() for j in range(g)])
    allocator.observe(ids, flags.astype(float), flags, step)


@every_config
def test_budget_and_bounds_always_hold(config):
    rng = np.random.default_rng(0)
    allocator = RolloutAllocator(config)
    assert allocator.allocate([], 0, step=0).shape == (0,) and allocator.last.history_share == 0
    for step in range(60):
        size = int(rng.integers(1, 30))
        ids = [f"p{i}" for i in rng.integers(0, 40, size)]  # some twice
        budget = int(rng.integers(2 * size, 24 * size + 1))
        n = allocator.allocate(ids, budget, step=step)
        assert n.dtype == np.int64 and n.sum() == budget and n.min() >= 2 and n.max() <= 24
        who = np.repeat(ids, n)
        rewards = rng.choice([0.0, 0.3, 1.0], len(who)) if step % 3 else np.ones(len(who))
        allocator.observe(who.tolist(), rewards, rewards == 1, step)


@every_config
def test_first_pass_is_uniform(config):
    allocator = RolloutAllocator(config)
    assert allocator.allocate(["a", "b", "c"], 26, step=1).tolist() == [9, 9, 8]
    assert not allocator.last.history.any()


@every_config
def test_nothing_to_tell_prompts_apart_gives_an_even_spread(config):
    allocator = RolloutAllocator(config)
    observe(allocator, {"a": (0, 8), "b": (0, 8), "c": (0, 8)})
    assert allocator.allocate(["a", "b", "c"], 24, step=2).tolist() == [8, 8, 8]


@every_config
def test_resume_through_json_is_exact(config):
    def run(steps, state=None):
        allocator = RolloutAllocator(AllocationConfig(**config))
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


@every_config
def test_order_of_rollouts_does_not_matter(config):
    rng = np.random.default_rng(3)
    who = rng.permutation(np.repeat([f"p{i}" for i in range(20)], 9))
    rewards = rng.uniform(size=len(who))
    states, counts = [], []
    for order in (np.arange(len(who)), rng.permutation(len(who))):
        allocator = RolloutAllocator(config)
        allocator.observe(who[order].tolist(), rewards[order], rewards[order] > 0.6, 1)
        states.append(allocator.state_dict())
        counts.append(allocator.allocate([f"p{i}" for i in range(20)], 200, step=2).tolist())
    assert states[0] == states[1] and counts[0] == counts[1]


def test_neyman_learns_who_is_mixed_and_logs_it():
    allocator = RolloutAllocator({"kind": "neyman", "variance_floor": 0.0})
    observe(allocator, {"solved": (16, 16), "mixed": (8, 16), "hopeless": (0, 16)}, step=1)
    n = allocator.allocate(["solved", "mixed", "new", "hopeless", "mixed"], 40, step=2)
    assert min(n[1], n[4]) > n[2] > max(n[0], n[3])
    rows = list(allocator.last.rows())
    assert rows[1]["prompt_id"] == "mixed" and rows[1]["step"] == 2 and rows[1]["n"] == n[1]
    assert [row["history"] for row in rows] == [True, True, False, True, True]
    assert rows[1]["variance"] > rows[2]["variance"] > rows[0]["variance"]
    assert allocator.last.history_share == 0.8
    json.dumps(rows)


def test_variance_floor_evens_out():
    counts = []
    for floor in (0.0, 1.0):
        allocator = RolloutAllocator({"kind": "neyman", "variance_floor": floor})
        observe(allocator, {"solved": (16, 16), "mixed": (8, 16)})
        counts.append(allocator.allocate(["solved", "mixed"], 20, step=2))
        bare = success.bernoulli(*posterior(allocator, [(16, 16), (8, 16)]))
        np.testing.assert_allclose(allocator.last.variance, bare + floor * bare.mean())
    assert counts[0][0] < counts[1][0] < counts[1][1] < counts[0][1]


def posterior(allocator, outcomes):
    k, g = np.array(outcomes, float).T
    a, b = success.beta_prior(k, g)
    return a + k, b + g - k


def test_forgetting_halves_an_observation_after_its_half_life():
    allocator = RolloutAllocator({"kind": "neyman", "half_life": 3})
    observe(allocator, {"a": (8, 8), "b": (1, 4)})
    for step in range(3):
        observe(allocator, {"a": (0, 2)}, step)
    trials, successes, mean, _ = allocator.state_dict()["prompts"]["a"]
    assert successes == pytest.approx(4) and trials == pytest.approx(4 + 2 * (1 + 0.5 ** (1 / 3) + 0.5 ** (2 / 3)))
    assert mean == pytest.approx(successes / trials)
    assert allocator.state_dict()["prompts"]["b"][:2] == [4, 1]  # its visits count, not the others'


def test_waterfill_uses_the_published_priority():
    outcomes = {"solved": (17, 20), "mixed": (8, 16), "rare": (1, 16)}
    k, g = np.array(list(outcomes.values())).T
    for power, exponent in (("sigma2", 1.0), ("sigma", 0.5)):
        allocator = RolloutAllocator({"kind": "waterfill", "power": power, "half_life": 1, "rollout_n_min": 4})
        observe(allocator, {"rare": (0, 8)})
        observe(allocator, {**outcomes, "rare": (1, 8)})  # 1 of 16 in two visits: nothing is forgotten
        n = allocator.allocate(["solved", "new", "mixed", "rare"], 40, step=2)
        priority = np.insert(success_variance(k, g), 1, 0.0)
        priority[0] = 0.01
        assert n.tolist() == waterfill(np.insert(g, 1, 0), priority**exponent, 40, 4, 24, 8).tolist()
        assert n[1] == 8


def test_beta_prior_recovers_the_truth_and_falls_back():
    rng = np.random.default_rng(0)
    trials = rng.integers(2, 25, 20_000).astype(float)
    for a, b in ((0.3, 0.3), (0.4, 1.2), (3.0, 3.0)):
        k = rng.binomial(trials.astype(int), rng.beta(a, b, len(trials))).astype(float)
        np.testing.assert_allclose(success.beta_prior(k, trials), (a, b), rtol=0.1)
    none = np.zeros(0)
    assert success.beta_prior(none, none) == (0.5, 0.5)
    assert sum(success.beta_prior(np.array([1.0]), np.array([4.0]))) == pytest.approx(1)  # one prompt: no spread
    assert sum(success.beta_prior(np.ones(5), np.ones(5))) == pytest.approx(1)  # single trials: no spread
    a, b = success.beta_prior(np.full(50, 4.0), np.full(50, 8.0))  # less spread than chance: all alike
    assert a == pytest.approx(b) and a + b == 1000
    a, b = success.beta_prior(np.repeat([0.0, 8.0], 50), np.full(100, 8.0))
    assert 0 < a + b < 0.3


def test_variance_models_are_the_posterior_expectations():
    rng = np.random.default_rng(0)
    a, b = np.array([0.5, 3.0, 9.0]), np.array([2.0, 3.0, 0.7])
    p = rng.beta(a, b, (400_000, 3))
    mean = a / (a + b)
    np.testing.assert_allclose(success.bernoulli(a, b), (p * (1 - p)).mean(0), rtol=0.01)
    want = (p * (1 - p) ** 2).mean(0) * (0.5 - np.log(mean)) + (p**2 * (1 - p)).mean(0) * (0.5 - np.log(1 - mean))
    np.testing.assert_allclose(success.surprise(a, b), want, rtol=0.01)


def test_empirical_variance_is_shrunk_to_the_pool():
    allocator = RolloutAllocator({"kind": "neyman", "variance": "empirical", "variance_floor": 0.0})
    rng = np.random.default_rng(0)
    rewards = {"a": rng.normal(0, 1, 9), "b": rng.normal(5, 3, 5)}
    ids = [i for i, r in rewards.items() for _ in r]
    allocator.observe(ids, np.concatenate(list(rewards.values())), np.zeros(len(ids), bool), 1)
    allocator.allocate(["a", "b", "new"], 24, step=2)
    squares = [((r - r.mean()) ** 2).sum() for r in rewards.values()]
    pool = sum(squares) / (8 + 4)
    want = [(squares[0] + 4 * pool) / 12, (squares[1] + 4 * pool) / 8, pool]
    np.testing.assert_allclose(allocator.last.variance, want, rtol=1e-12)


def test_visits_merge_to_the_variance_of_all_rewards():
    allocator = RolloutAllocator({"kind": "waterfill"})  # forgets nothing
    rewards = np.random.default_rng(0).normal(100, 1, 30)
    for part in np.split(rewards, [3, 11]):
        allocator.observe(["a"] * len(part), part, np.zeros(len(part), bool), 1)
    assert allocator.state_dict()["prompts"]["a"] == pytest.approx([30, 0, rewards.mean(), 30 * rewards.var()])


def test_neyman_beats_uniform_where_success_is_spread_and_costs_little_where_it_is_not():
    """Sum p(1-p)/n against uniform's after one visit of 16 each; the optimum with p known is .75 and .99."""
    for (a, b), bar in (((0.3, 0.3), 0.81), ((3.0, 3.0), 1.005)):
        rng = np.random.default_rng(0)
        p = rng.beta(a, b, 4096)
        ids = [f"p{i}" for i in range(len(p))]
        allocator = RolloutAllocator({"kind": "neyman", "variance_floor": 0.0, "rollout_n_min": 8})
        observe(allocator, dict(zip(ids, ((k, 16) for k in rng.binomial(16, p)), strict=True)))
        n = allocator.allocate(ids, 16 * len(p), step=2)
        assert (p * (1 - p) / n).sum() / (p * (1 - p) / 16).sum() < bar


def test_shortfall():
    with pytest.raises(ValueError, match="budget"):
        RolloutAllocator({"kind": "neyman"}).allocate(["a"], 25, step=1)
    assert RolloutAllocator({"kind": "neyman", "on_shortfall": "clip"}).allocate(["a"], 25, step=1).tolist() == [24]
    for kind in ("uniform", "waterfill", "neyman"):
        scaled = RolloutAllocator({"kind": kind, "on_shortfall": "scale", "rollout_n_min": 8})
        assert scaled.allocate(["a", "b"], 4, step=1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["x", "bad"], [0.0, np.nan], [False, False], 3), "'bad'.*nan"),
        ((["bad", "bad"], [1e200, -1e200], [False, False], 3), "'bad'"),
        ((["x", "bad"], [0.0, 1.0], [0, 2], 3), "'bad'.*2"),
        ((["x"], [0.0, 1.0], [True, True], 3), "prompt_ids"),
    ],
)
def test_bad_observations_name_the_prompt_and_change_nothing(arguments, message):
    allocator = RolloutAllocator({})
    with pytest.raises(ValueError, match=message):
        allocator.observe(*arguments)
    assert allocator.state_dict() == {"prompts": {}}


@pytest.mark.parametrize(
    "numbers",
    [[2, 3, 0.5, 1], [float("nan"), 0, 0, 0], [2, -1, 0, 0], [2, 1, 0, -1], [0, 0, 0, 0], [2, 1, 0], ["2", 1, 0, 0]],
)
def test_a_contradictory_state_names_the_prompt(numbers):
    with pytest.raises(ValueError, match="'bad'"):
        RolloutAllocator({}).load_state_dict({"prompts": {"fine": [2, 1, 0.5, 0.5], "bad": numbers}})


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="state"):
        RolloutAllocator({}).load_state_dict({"epoch": 1})
