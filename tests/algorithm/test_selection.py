import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.selection import ENTROPY_GRID, clip_cov, covariance, kl_cov, random_keys, top_entropy


@pytest.mark.parametrize(("n", "ratio", "count"), [(10, 0.2, 2), (12, 0.2, 3), (3, 0.1, 1), (30, 0.1, 3), (5, 1.0, 5)])
def test_top_entropy_takes_the_highest_and_rounds_up(n, ratio, count):
    entropy = np.random.default_rng(n).exponential(size=n).astype(np.float32)
    want = np.zeros(n, bool)
    want[sorted(range(n), key=lambda i: -entropy[i])[:count]] = True
    assert (top_entropy(entropy, ratio) == want).all()


def test_entropies_equal_but_for_rounding_go_to_the_lower_slot():
    rng = np.random.default_rng(0)
    level = np.repeat(rng.permutation(200) * 0.01, 5)  # the first tokens of five rollouts of one prompt, and so on
    first = top_entropy(level, 0.3)
    assert first.sum() == 300
    for _ in range(20):
        assert (top_entropy((level + rng.normal(0, 1e-7, 1000)).astype(np.float32), 0.3) == first).all()
    assert top_entropy(np.full(6, 1.0) + ENTROPY_GRID / 100 * np.arange(6), 0.5).tolist() == [True] * 3 + [False] * 3


def test_covariance_of_each_token():
    rng = np.random.default_rng(1)
    advantages, logprobs = rng.normal(size=500).astype(np.float32), -rng.exponential(size=500).astype(np.float32)
    want = (advantages - advantages.astype(float).mean()) * (logprobs - logprobs.astype(float).mean())
    np.testing.assert_allclose(covariance(advantages, logprobs), want, rtol=1e-12)
    assert not covariance(np.full(500, -0.866), logprobs).any()  # whose mean is another number by rounding


def test_kl_cov_takes_the_largest_and_at_least_one():
    values = np.random.default_rng(2).normal(size=1000)
    for ratio, count in ((0.002, 2), (0.29, 290), (1e-6, 1)):
        assert set(np.flatnonzero(kl_cov(values, ratio=ratio))) == set(np.argsort(-values)[:count])
    assert np.flatnonzero(kl_cov(np.zeros(10), ratio=0.3)).tolist() == [0, 1, 2]


def test_clip_cov_draws_from_the_open_band_only():
    rng = np.random.default_rng(3)
    values, keys = rng.uniform(0, 10, 2000), rng.random(2000)
    inside = np.flatnonzero((values > 1) & (values < 5))
    chosen = np.flatnonzero(clip_cov(values, keys, ratio=0.01, low=1.0, high=5.0))
    assert len(chosen) == 20 and set(chosen) == set(sorted(inside, key=lambda i: keys[i])[:20])
    assert clip_cov(values, keys, ratio=0.9, low=1.0, high=5.0).sum() == len(inside)
    assert clip_cov(np.array([1.0, 5.0, 0.5]), keys[:3], ratio=1.0, low=1.0, high=5.0).sum() == 0
    assert clip_cov(values, keys, ratio=1e-9, low=1.0, high=5.0).sum() == 1


def test_random_keys_belong_to_the_rollout_not_to_the_order():
    ids, lengths = ["3/p/0-0", "3/p/0-1", "3/q/0-0"], np.array([4, 0, 3])
    keys = random_keys(ids, lengths, seed=0)
    assert keys.shape == (7,) and (keys >= 0).all() and (keys < 1).all() and len(set(keys)) == 7
    swapped = random_keys(ids[::-1], lengths[::-1], seed=0)
    assert (np.concatenate([swapped[3:], swapped[:3]]) == keys).all()
    assert not (random_keys(["4/p/0-0"], np.array([4]), seed=0) == keys[:4]).any()
    assert not (random_keys(ids, lengths, seed=1) == keys).any()


def test_no_token_selects_nothing():
    nothing = torch.zeros(0)
    assert len(top_entropy(nothing, 0.2)) == len(kl_cov(covariance(nothing, nothing), ratio=0.1)) == 0
    assert len(clip_cov(nothing, nothing, ratio=0.1, low=1.0, high=5.0)) == 0
