import numpy as np
import pytest

from dynamo_megatron.algorithm.allocation import neyman


def greedy(variance, budget, low, high):
    """One rollout at a time to the largest gain, ties to the lower index: the optimum, as gains fall with n."""
    n = [low] * len(variance)
    for _ in range(min(max(budget, low * len(n)), high * len(n)) - sum(n)):
        gains = [v / (k * (k + 1)) if k < high else -1 for v, k in zip(variance, n, strict=True)]
        n[gains.index(max(gains))] += 1
    return n


def random_variance(rng, size):
    kind = rng.integers(5)
    if kind == 0:
        return rng.uniform(size=size)
    if kind == 1:
        return rng.choice([0.0, 0.1, 0.2], size)  # ties and zeros
    if kind == 2:
        return 10.0 ** rng.uniform(-300, 0, size)
    if kind == 3:
        return rng.integers(0, 7, size).astype(float)  # ties between different counts: 1/2 = 3/6
    return np.full(size, rng.choice([0.0, 0.25, 1e-320]))


def test_is_the_optimum_and_gives_ties_to_the_lower_index():
    rng = np.random.default_rng(1)
    for _ in range(500):
        size, low = int(rng.integers(1, 40)), int(rng.integers(1, 4))
        high = low + int(rng.integers(0, 30))
        budget = int(rng.integers(0, size * high + 5))
        variance = random_variance(rng, size)
        assert neyman(variance, budget, low, high).tolist() == greedy(variance, budget, low, high)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="variance: entry 1"):
        neyman(np.array([1.0, np.nan]), 4, 1, 4)
    with pytest.raises(ValueError, match="rollout_n_min"):
        neyman(np.ones(2), 4, 5, 4)
