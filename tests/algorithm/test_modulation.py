import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges

PUBLISHED = {"alpha": 0.2, "lambda_min": 0.6, "gamma": 50.0, "tau": 0.99}


def inputs(case):
    names = ("advantages", "logprobs", "entropy", "old_logprobs", "mask")
    return tuple(np.array(case[name]) for name in names), (case["clip_low"], case["clip_high"])


@pytest.mark.parametrize("enter", [np.asarray, torch.tensor])
def test_vectors(vectors, enter):
    for case in vectors("modulation"):
        given, clip = inputs(case)
        advantages, _, entropy, _, mask = given = tuple(enter(x) for x in given)
        change = entropy_change(*given, *clip)
        ranges = modulation_ranges(entropy, change, mask)
        settings = {"alpha": case["mu_max"] - 1, **{k: case[k] for k in ("lambda_min", "gamma", "tau")}}
        result = modulate(advantages, entropy, change, ranges, **settings)
        assert type(change) is type(result.advantages) is type(advantages)
        close = {"rtol": 1e-6, "atol": 1e-12}
        np.testing.assert_allclose(change, case["entropy_change"], **close)
        np.testing.assert_allclose(result.beta_stab, case["beta_stab"], **close)
        np.testing.assert_allclose(result.beta_comp, case["beta_comp"], **close)
        np.testing.assert_allclose(result.advantages, case["advantages_final"], **close)


def test_exact_expectation_is_what_the_formula_gives_token_by_token(vectors):
    for case in vectors("modulation"):
        (advantages, logprobs, entropy, old, mask), (low, high) = inputs(case)
        expected = np.zeros_like(entropy)
        want = np.zeros_like(entropy)
        for at in np.ndindex(entropy.shape):
            logits = np.array(case["logits"])[at] / case["temperature"]
            p = np.exp(logits) / np.exp(logits).sum()
            h = -sum(p_v * np.log(p_v) for p_v in p)
            assert h == pytest.approx(entropy[at], rel=1e-6)
            assert np.log(p[np.array(case["labels"])[at]]) == pytest.approx(logprobs[at], rel=1e-6)
            expected[at] = sum(p_v * p_v * (np.log(p_v) + h) for p_v in p)
            a, r, pi = advantages[at], np.exp(logprobs[at] - old[at]), np.exp(logprobs[at])
            if mask[at] and ((a > 0 and r <= 1 + high) or (a < 0 and r >= 1 - low)):
                want[at] = abs(r * a * (pi * (logprobs[at] + h) - expected[at]))
        got = entropy_change(advantages, logprobs, entropy, old, mask, low, high, expected)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)
        assert not np.allclose(got, entropy_change(advantages, logprobs, entropy, old, mask, low, high))
        flat = [x.reshape(-1) for x in (advantages, logprobs, entropy, old, mask)]
        np.testing.assert_array_equal(entropy_change(*flat, low, high, expected.reshape(-1)), got.reshape(-1))


def test_entropy_change_is_differentiable():
    rng = np.random.default_rng(0)
    advantages, logprobs, entropy, old, expected = torch.tensor(rng.uniform(-1, 0, (5, 12)))
    mask = torch.ones(12)
    logprobs.requires_grad_(), entropy.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda lp, h: entropy_change(advantages, lp, h, old, mask, 0.2, 0.2, expected), (logprobs, entropy)
    )
    change = entropy_change(advantages, logprobs, entropy, old, mask, 0.2, 0.2)
    result = modulate(advantages, entropy, change, modulation_ranges(entropy, change, mask), **PUBLISHED)
    assert not any(part.requires_grad for part in result)


def test_tokens_outside_the_mask_are_not_looked_at():
    nan = float("nan")
    mask = np.array([[1.0, 1.0, 0.0]])
    clean, dirty = np.array([[-0.5, -1.5, -2.0]]), np.array([[-0.5, -1.5, nan]])
    for expected in (None, dirty):
        args = (np.ones((1, 3)), dirty, -dirty, dirty, mask, 0.2, 0.2)
        change = entropy_change(*args, expected)
        want = entropy_change(
            np.ones((1, 3)), clean, -clean, clean, mask, 0.2, 0.2, None if expected is None else clean
        )
        np.testing.assert_array_equal(change, want)
        ranges = modulation_ranges(-dirty, change, mask)
        assert (float(ranges.entropy_min), float(ranges.entropy_max)) == (0.5, 1.5)


def test_ranges_without_a_token_leave_a_reduction_unchanged():
    for x in (np.zeros(0), np.ones(3)):
        assert [float(v) for v in modulation_ranges(x, x, np.zeros_like(x))] == [np.inf, -np.inf, -np.inf]


def test_ranges_of_an_older_policy_do_not_push_the_factors_out_of_their_range():
    ranges = ModulationRanges(1.0, 2.0, 0.5)
    entropy, change = np.array([0.5, 3.0, 1.5]), np.array([5.0, 0.0, 0.25])
    result = modulate(np.ones(3), entropy, change, ranges, **PUBLISHED)
    np.testing.assert_allclose(result.beta_comp, [1.2, 1.0, 1.1], rtol=1e-6)
    np.testing.assert_allclose(result.beta_stab, [0.6 + 0.4 / (1 + np.exp(0.5)), 1.0, 1.0], rtol=1e-6)


def test_nothing_to_scale_by_scales_nothing():
    result = modulate(np.array([2.0, -2.0]), np.ones(2), np.zeros(2), ModulationRanges(1.0, 1.0, 0.0), **PUBLISHED)
    np.testing.assert_allclose(result.advantages, [2.0, -2.0], rtol=1e-12)


def test_extreme_inputs_stay_finite_and_dtypes_stay():
    x = np.array([-0.1, -0.1], np.float32)
    change = entropy_change(np.array([1, -1], np.float32), x, -x, x - 300, np.ones(2), 0.2, 0.2, x)
    assert change.dtype == np.float32 and np.isfinite(change).all() and change[0] == 0 < change[1]
    steep = modulate(x, -x, -x, ModulationRanges(0.0, 1.0, 1.0), **{**PUBLISHED, "gamma": 1e6})
    assert all(np.isfinite(part).all() and part.dtype == np.float32 for part in steep)
