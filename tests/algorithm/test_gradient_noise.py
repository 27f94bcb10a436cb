"""Against every draw of a case small enough to count out."""

import itertools

import numpy as np
import pytest

from dynamo_megatron.algorithm.advantages import history_advantages
from dynamo_megatron.algorithm.gradient_noise import nested_split

# Two kinds of prompt, each as likely: of every answer its probability and its x, the advantage times the gradient.
KINDS = [[(0.5, [1.0, 2.0]), (0.5, [-3.0, 1.0])], [(0.25, [2.0, -4.0]), (0.75, [0.0, 0.5])]]
MEANS = np.array([[-1.0, 1.5], [0.5, -0.625]])
SIGNAL = 0.25**2 + 0.4375**2  # of (MEANS[0] + MEANS[1]) / 2
BETWEEN = (1 + 1.5**2 + 0.5**2 + 0.625**2) / 2 - SIGNAL
# Per coordinate p (1 - p) times the squared distance of the two answers.
WITHIN = (0.25 * (4**2 + 1) + 3 / 16 * (2**2 + 4.5**2)) / 2
COUNTS = {"two each": [2, 2, 2, 2], "from one to three": [1, 3, 2, 1]}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("aggregation", ["prompt_mean", "token_mean"])
def test_the_mean_over_all_draws(counts, ranks, aggregation):
    counts = COUNTS[counts]
    prompt = np.repeat(np.arange(4), counts)
    split = nested_split(prompt, prompt, aggregation, ranks, np.random.default_rng(0))
    assert split.weights.sum() == pytest.approx(1)
    assert len({tuple(x) for x in zip(split.rank[prompt == 1], split.part[prompt == 1] == 2, strict=True)}) == 1
    squares, whole = np.zeros(2), 0.0
    for kinds in itertools.product(KINDS, repeat=4):
        for answers in itertools.product(*(kinds[i] for i in prompt)):
            chance = np.prod([p for p, _ in answers]) / 2**4
            weighted = split.weights[:, None] * np.array([x for _, x in answers])
            for last in (0, 1):
                for rank in range(ranks):
                    mine = weighted[(split.rank == rank) & (split.part <= last)].sum(0)
                    squares[last] += chance * mine @ mine
            whole += chance * weighted.sum(0) @ weighted.sum(0)
    noise = split.noise(squares, whole)
    assert (noise.signal, noise.between, noise.within) == pytest.approx((SIGNAL, BETWEEN, WITHIN))


def test_a_rollout_counts_what_the_loss_makes_it_count():
    prompt, rng = np.repeat(np.arange(4), [1, 3, 2, 2]), np.random.default_rng(0)
    by_prompt = [1 / 4, 1 / 12, 1 / 12, 1 / 12, 1 / 8, 1 / 8, 1 / 8, 1 / 8]
    cases = {"prompt_mean": by_prompt, "prompt_token_mean": by_prompt, "token_mean": [1 / 8] * 8}
    for aggregation, weights in cases.items():
        assert nested_split(prompt, prompt, aggregation, 1, rng).weights == pytest.approx(weights)


def test_two_groups_of_a_prompt_are_one_prompt():
    """Drawn twice, it counts twice in every sum of its rollouts: w = 1/5 and 2 x 1/5 of the prompt."""
    prompt = np.array([0, 0, 1, 1, 2, 2, 3, 3, 0, 0])
    group = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    split = nested_split(prompt, group, "prompt_mean", 2, np.random.default_rng(0))
    assert (split.weights == 0.1).all()
    assert len(set(split.rank[prompt == 0])) == 1 and sorted(split.part[prompt == 0]) == [0, 0, 1, 1]
    u = np.bincount(prompt, split.weights)
    expected = [
        sum(
            3 * w.sum() ** 2 + 5 * (np.bincount(prompt, w) ** 2).sum() + 7 * (w**2).sum()
            for w in (split.weights * ((split.part <= last) & (split.rank == rank)) for rank in (0, 1))
        )
        for last in (0, 1)
    ]
    found = split.noise(expected, 3 * u.sum() ** 2 + 5 * (u**2).sum() + 7 * (split.weights**2).sum())
    assert (found.signal, found.between, found.within) == pytest.approx((3, 5, 7))


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 1, 1, 1], [9, 1, 1, 1]])
def test_too_little_to_tell(counts):
    prompt = np.repeat(np.arange(len(counts)), counts)
    assert nested_split(prompt, prompt, "prompt_mean", 1, np.random.default_rng(0)) is None


def test_every_prompt_and_every_rollout_may_be_in_every_place():
    prompt = np.repeat(np.arange(6), 2)
    splits = [nested_split(prompt, prompt, "prompt_mean", 1, np.random.default_rng(i)) for i in range(200)]
    left_out = np.array([s.part[::2] == 2 for s in splits])
    assert (left_out.sum(1) == 3).all() and (np.abs(left_out.mean(0) - 0.5) < 0.15).all()
    first_part = np.array([s.part == 0 for s in splits])
    assert (first_part.sum(1) == 3).all() and (np.abs(first_part.mean(0) - 0.25) < 0.15).all()


def test_the_groups_own_part_of_a_baseline():
    """The rollouts of a pair are in each other's baseline from history: instead of |g|^2 the product of their gradients
    has the mean (1 + 1/(c+1)^2) |g|^2, as docs/gradient-variance.md says. Rewards 0 and 1, gradients -3 and 1."""
    strength, p = 2.0, 0.75
    product = 0.0
    for rewards in itertools.product((0, 1), repeat=2):
        chance = np.prod([p if r else 1 - p for r in rewards])
        advantages = history_advantages(np.array(rewards, float), [0, 0], [0.5] * 2, [strength] * 2)
        product += chance * np.prod(advantages * np.where(rewards, 1.0, -3.0))
    assert product == pytest.approx((1 + 1 / 9) * p**2)
