import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.allocation import waterfill

CASE = ("sample_counts", "priority", "total_rollout_n", "rollout_n_min", "rollout_n_max", "initial_budget")


def test_reference_values(vectors):
    for case in vectors("allocation"):
        got = waterfill(np.array(case["sample_counts"]), np.array(case["priority"]), *(case[k] for k in CASE[2:]))
        assert got.tolist() == case["expected"]


def test_explores_then_follows_the_priority():
    # 8 for the prompt never seen, the lower bound for all, the rest by priority
    assert waterfill(np.array([0, 16, 16]), np.array([0.0, 0.1, 0.3]), 24, 4, 24, 8).tolist() == [8, 6, 10]
    # exploring two prompts takes all but one of the budget; the third still gets its lower bound, off the first
    assert waterfill(np.array([0, 0, 30]), np.array([0.0, 0.0, 1.0]), 17, 4, 24, 8).tolist() == [6, 7, 4]


def test_torch_in_torch_out_and_no_prompts():
    assert torch.equal(waterfill(torch.zeros(2, dtype=torch.int64), torch.ones(2), 4, 1, 5, 1), torch.tensor([2, 2]))
    assert waterfill(np.zeros(0), np.zeros(0), 5, 1, 4, 2).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: waterfill(np.zeros(2), np.array([np.inf, 0]), 4, 1, 4, 2), "priority: entry 0"),
        (lambda: waterfill(np.array([1, -1]), np.ones(2), 4, 1, 4, 2), "sample_counts: entry 1"),
        (lambda: waterfill(np.zeros(3), np.ones(2), 4, 1, 4, 2), "sample_counts"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
