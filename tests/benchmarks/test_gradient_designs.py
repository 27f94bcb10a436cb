"""Against every draw of a case small enough to count out."""

import dataclasses
import itertools

import numpy as np
import pytest
from gradient_designs import Design, Estimate, Pool, compare, designs, moments, prompt_parts, signal_share

from dynamo_megatron.algorithm.advantages import group_advantages, history_advantages
from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.gradient_noise import nested_split

HALF = np.sqrt(0.5)
# Two kinds of prompt, each as likely: of every answer its probability, its reward, the gradient of its logprob (whose
# mean is 0, as of all scores).
KINDS = [
    [
        (0.5, 1, np.array([1.0, 0.0, 2.0])),
        (0.25, 0, np.array([-3.0, 1.0, -4.0])),
        (0.25, 0, np.array([1.0, -1.0, 0.0])),
    ],
    [(0.2, 1, np.array([2.0, -4.0, 0.0])), (0.4, 0, np.array([1.0, 2.0, 0.5])), (0.4, 0, np.array([-2.0, 0.0, -0.5]))],
]


def every_draw(stored):
    """(probability, gradients [2, stored, 3], rewards [2, stored]) of two prompts with `stored` rollouts each."""
    for kinds in itertools.product(KINDS, repeat=2):
        for answers in itertools.product(*(itertools.product(kind, repeat=stored) for kind in kinds)):
            chance = 0.25 * np.prod([p for rollouts in answers for p, _, _ in rollouts])
            gradients = np.array([[g for _, _, g in rollouts] for rollouts in answers], float)
            yield chance, gradients, np.array([[r for _, r, _ in rollouts] for rollouts in answers], float)


def rloo(rewards):
    return rewards - rewards[:, ::-1]


def grpo(rewards):
    return np.sign(rewards - rewards[:, ::-1]) * HALF


def history(rewards):
    """Of the second rollout, after the first: the pool's mean, held in [.02, .98], counts as one rollout."""
    centre = np.clip(rewards[:, 0].mean(), 0.02, 0.98)
    baseline = (centre + rewards[:, 0]) / 2
    return np.stack([np.zeros(2), rewards[:, 1] - baseline], axis=1)


CASES = {"rloo": (rloo, 2, 0), "grpo": (grpo, 2, 0), "history": (history, 1, 1)}


@pytest.mark.parametrize("baseline", CASES)
def test_the_estimate_is_unbiased(baseline):
    """Its mean over all data sets is the variance of the gradient over all mini-batches, between prompts and within."""
    advantages, rollouts, past = CASES[baseline]
    design, squared, mean, estimate = Design(2, rollouts, baseline, "uniform"), 0.0, 0.0, 0.0
    order = np.broadcast_to(np.arange(2), (1, 2, 2))
    for chance, gradients, rewards in every_draw(2):
        gradient = np.einsum("ij,ijd->d", advantages(rewards), gradients) / (2 * rollouts)
        squared, mean = squared + chance * gradient @ gradient, mean + chance * gradient
        pool = Pool.of(gradients, rewards, np.ones_like(rewards))
        found = moments(pool, design, order, past, np.random.default_rng(0))
        estimate += chance * Estimate(pool, design, found).spread(np.ones(2))
    assert estimate == pytest.approx(squared - mean @ mean, rel=1e-5)  # grpo adds 1e-6 to the std


def test_prompts_counted_twice_are_no_pairs():
    """Of three prompts, one counted twice and one not at all, only the pairs of different ones enter."""
    rng = np.random.default_rng(0)
    gradients, rewards = rng.normal(size=(3, 4, 5)), np.array([[1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 0, 0]], float)
    pool = Pool.of(gradients, rewards, np.ones_like(rewards))
    design = Design(2, 2, "rloo", "uniform")
    orders = np.argsort(rng.random((3, 3, 4)), axis=2)
    found = moments(pool, design, orders, 0, rng)
    estimate = Estimate(pool, design, found)
    # rloo over all four rollouts: (r_j - mean of the others) / 4.
    a, b = (
        sum((r - (rs.sum() - r) / 3) / 4 * g for r, g in zip(rs, gs, strict=True))
        for rs, gs in zip(rewards[:2], gradients[:2], strict=True)
    )
    expected = ((2 * found.squared[0] + found.squared[1]) / 3 - a @ b) / 2
    assert estimate.spread(np.array([2.0, 1.0, 0.0])) == pytest.approx(expected)


def test_grpos_scale():
    """Groups of one right and one wrong rollout: rloo gives +-1, grpo +-sqrt(1/2)."""
    gradients = np.array([[[1.0, 0.0], [0.0, 1.0]]] * 3)
    pool = Pool.of(gradients, np.array([[1.0, 0.0]] * 3), np.ones((3, 2)))
    design = Design(2, 2, "grpo", "uniform")
    order = np.broadcast_to(np.arange(2), (1, 3, 2))
    estimate = Estimate(pool, design, moments(pool, design, order, 0, np.random.default_rng(0)))
    assert estimate.scale(np.ones(3)) == pytest.approx(HALF, abs=1e-5)


def rollouts_of(prompts, stored, seed=0):
    """(gradients, rewards, energy) of prompts whose success rates are spread over (0, 1), and whose right and wrong
    rollouts differ in gradient."""
    rng = np.random.default_rng(seed)
    rate = rng.uniform(0.05, 0.95, prompts)
    rewards = (rng.random((prompts, stored)) < rate[:, None]).astype(float)
    direction = rng.normal(size=(prompts, 1, 6)) * (rewards - rate[:, None])[..., None]
    gradients = direction + 0.5 * rng.normal(size=(prompts, stored, 6))
    return gradients, rewards, 1 + rng.random((prompts, stored))


def pool_of(prompts, stored):
    return Pool.of(*rollouts_of(prompts, stored))


def test_what_training_measures_is_what_the_stored_gradients_say():
    """From three norms of each of many mini-batches, by one rank and by two."""
    gradients, rewards, energy = rollouts_of(40, 24)
    rng = np.random.default_rng(0)
    orders = np.argsort(rng.random((16, *rewards.shape)), axis=2)
    pool = Pool.of(gradients, rewards, energy)
    expected = signal_share(pool, prompt_parts(pool, orders, 8), 8)
    for ranks in (1, 2):
        measured = np.zeros(3)
        for _ in range(1500):
            prompts = rng.choice(40, 8, replace=False).repeat(8)
            rollouts = np.argsort(rng.random((8, 24)))[:, :8].ravel()
            advantages = group_advantages(rewards[prompts, rollouts], prompts, "rloo")
            split = nested_split(prompts, prompts, "prompt_mean", ranks, rng)
            added = (split.weights * advantages)[:, None] * gradients[prompts, rollouts]
            squares = [
                sum((added[(split.rank == r) & (split.part <= last)].sum(0) ** 2).sum() for r in range(ranks))
                for last in (0, 1)
            ]
            measured += dataclasses.astuple(split.noise(squares, (added.sum(0) ** 2).sum()))
        signal, between, within = measured
        found = {"|g|^2/s^2": (signal + between) / within, "between prompts": between / (between + within / 8)}
        assert found == pytest.approx(expected, rel=0.1)


def test_against_mini_batches_drawn_one_by_one():
    """Counts by an allocator: gradients of new prompts with new rollouts vary by what stored ones say."""
    rng = np.random.default_rng(1)
    rates, directions = np.array([0.02, 0.5, 0.98]), rng.normal(size=(3, 4))
    ids, past, design = [str(i) for i in range(40)], 8, Design(4, 4, "history", "neyman bernoulli")
    config = {"kind": "neyman", "rollout_n_min": 1, "rollout_n_max": 16}

    def draw(kinds, count):
        rewards = (rng.random((len(kinds), count)) < rates[kinds][:, None]).astype(float)
        signal = (rewards - rates[kinds][:, None])[..., None] * directions[kinds][:, None]
        return rewards, signal + 0.3 * rng.normal(size=(len(kinds), count, 4))

    drawn = []
    for _ in range(1500):
        kinds, allocator = rng.integers(0, 3, 40), RolloutAllocator(config)
        seen = draw(kinds, past)[0].ravel()
        allocator.observe(np.repeat(ids, past), seen, seen == 1, 0, np.ones(len(seen)))
        counts, known = allocator.decide(ids[:4], 16, step=1).counts, allocator.reward_baseline(ids[:4])
        group, (rewards, gradients) = np.repeat(np.arange(4), counts), draw(kinds[:4].repeat(counts), 1)
        baseline = (known.mean[group], known.strength[group])
        weights = history_advantages(rewards[:, 0], group, *baseline) / counts[group] / 4
        drawn.append(weights @ gradients[:, 0])
    found = []
    for _ in range(10):
        rewards, gradients = draw(rng.integers(0, 3, 40), past + 16)
        pool = Pool.of(gradients, rewards, np.ones_like(rewards))
        orders = np.argsort(rng.random((8, *rewards.shape)), axis=2)
        found.append(Estimate(pool, design, moments(pool, design, orders, past, rng)).spread(np.ones(40)))
    assert np.mean(found) == pytest.approx(np.var(drawn, axis=0).sum(), rel=0.1)


def test_the_signal_and_what_lies_between_prompts():
    """Half of the answers are right, their gradients g and -g, another g for each prompt: a pair gives g half of the
    time and else 0, so |g_i|^2 = 1/4 and s_i^2 / 2 = 1/2 - 1/4; half of the variance lies between prompts."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((200, 16)) < 0.5).astype(float)
    gradients = (2 * rewards - 1)[..., None] * np.eye(200)[:, None]
    orders = np.argsort(rng.random((16, 200, 16)), axis=2)
    pool = Pool.of(gradients, rewards, np.ones_like(rewards))
    parts = prompt_parts(pool, orders, 2)
    assert parts[0].mean() == pytest.approx(0.25, rel=0.1) and parts[1].mean() == pytest.approx(0.5, rel=0.1)
    found = signal_share(pool, parts, 2)
    assert found == pytest.approx({"|g|^2/s^2": 0.5, "between prompts": 0.5}, rel=0.1)


def test_which_designs_there_are():
    kinds = {(d.prompts, d.baseline, d.allocator) for d in designs([(4, 2), (8, 1)])}
    assert (8, "rloo", "uniform") not in kinds and (8, "history", "uniform") in kinds
    assert (4, "rloo", "neyman surprise") not in kinds and (4, "history", "neyman surprise") in kinds


def test_the_first_shape_is_the_unit():
    pool = pool_of(12, 16)
    orders = np.argsort(np.random.default_rng(0).random((8, 12, 16)), axis=2)
    rows = compare(pool, [(2, 4), (4, 2)], history=4, orders=orders, resamples=50)
    (unit,) = [r for r in rows if (r["shape"], r["baseline"], r["allocator"]) == ("2x4", "rloo", "uniform")]
    assert unit["variance"] == 1 and unit["interval"] == [1, 1]
    assert all(r["interval"][0] <= r["variance"] <= r["interval"][1] for r in rows)
