import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges

PUBLISHED = {"alpha": 0.2, "lambda_min": 0.6, "gamma": 50.0, "tau": 0.99}


@pytest.mark.parametrize("enter", [np.asarray, torch.tensor])
def test_vectors(vectors, enter):
    for case in vectors("modulation"):
        names = ("advantages", "logprobs", "entropy", "old_logprobs", "mask")
        advantages, _, entropy, _, mask = given = tuple(enter(np.array(case[name])) for name in names)
        change = entropy_change(*given, case["clip_low"], case["clip_high"])
        ranges = modulation_ranges(entropy, change, mask)
        settings = {"alpha": case["mu_max"] - 1, **{k: case[k] for k in ("lambda_min", "gamma", "tau")}}
        result = modulate(advantages, entropy, change, ranges, **settings)
        assert type(change) is type(result.advantages) is type(advantages)
        got = (change, result.beta_stab, result.beta_comp, result.advantages)
        for value, name in zip(got, ("entropy_change", "beta_stab", "beta_comp", "advantages_final"), strict=True):
            np.testing.assert_allclose(value, case[name], rtol=1e-6, atol=1e-12)


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
