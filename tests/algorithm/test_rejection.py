import numpy as np
import pytest

from dynamo_megatron.algorithm.rollout_correction import mean_gaps, rejections

LENGTHS = np.array([20, 1, 0, 3])
VERSIONS = np.full(24, 4)


@pytest.fixture
def pair():
    """(policy's logprobs, the engine's): bfloat16's noise, with one token in it that is 0.45 nats off."""
    rng = np.random.default_rng(0)
    engine = -rng.exponential(1.0, 24).astype(np.float32)
    policy = engine + rng.normal(0, 0.03, 24).astype(np.float32)
    policy[20] = engine[20] + 0.45
    return policy, engine


def test_noise_passes_also_in_a_response_of_one_token(pair):
    assert rejections(*pair, LENGTHS, VERSIONS, 4, 0.3) == {}
    assert mean_gaps(*pair, LENGTHS)[1] == pytest.approx(0.45 / 8)


def test_what_is_rejected_and_why(pair):
    policy, engine = pair
    assert rejections(policy, engine, LENGTHS, VERSIONS, 5, None).keys() == {0, 1, 3}
    older = VERSIONS.copy()
    older[21] = 3
    assert rejections(policy, engine, LENGTHS, older, 4, 0.3) == {3: "sampled from weight version 3 to 4, not 4"}
    assert rejections(policy, engine, LENGTHS, older, 3, 0.3)[3] == "sampled from weight version 3 to 4, not 3"
    engine[:20] = policy[:20] - 0.5
    engine[20] = -9.0
    found = rejections(policy, engine, LENGTHS, VERSIONS, 4, 0.3)
    assert found.keys() == {0, 1} and found[0] == "logprobs 0.5 nats from the policy's on average"
    assert rejections(policy, engine, LENGTHS, VERSIONS, 4, None) == {}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_finite_is_always_rejected(pair, bad, both):
    policy, engine = pair
    engine[22] = bad
    if both:
        policy[22] = bad
    assert rejections(policy, engine, LENGTHS, VERSIONS, 4, None) == {3: "a logprob that is not finite"}


def test_an_unknown_version_is_none_that_the_bound_allows(pair):
    versions = np.array([1] * 20 + [-1, 0, 1, 1])
    found = rejections(*pair, LENGTHS, versions, 1, None, 3)
    assert found == {1: "sampled from weight version -1, not 0 to 1"}


def test_older_weights_within_the_bound_are_no_reason_and_their_gap_is_none(pair):
    policy, engine = pair
    versions = np.array([2] * 10 + [4] * 11 + [1, 2, 4])
    engine[:10] = policy[:10] - 5.0  # of older weights: another policy
    assert rejections(policy, engine, LENGTHS, versions, 4, 0.3, 3) == {}
    assert rejections(policy, engine, LENGTHS, versions, 4, 0.3, 2) == {
        3: "sampled from weight version 1 to 4, not 2 to 4"
    }
    assert (
        rejections(policy, engine, LENGTHS, versions, 3, 0.3, 2)[0] == "sampled from weight version 2 to 4, not 1 to 3"
    )
    engine[10:20] = policy[10:20] - 0.5  # of the present ones
    assert rejections(policy, engine, LENGTHS, versions, 4, 0.3, 3) == {
        0: "logprobs 0.5 nats from the policy's on average"
    }
    engine[3] = np.nan
    assert rejections(policy, engine, LENGTHS, versions, 4, 0.3, 3) == {0: "a logprob that is not finite"}
