import numpy as np

from dynamo_megatron.algorithm.allocation import waterfill

BOUNDS = ("total_rollout_n", "rollout_n_min", "rollout_n_max", "initial_budget")


def test_reference_values(vectors):
    for case in vectors("allocation"):
        got = waterfill(np.array(case["sample_counts"]), np.array(case["priority"]), *(case[k] for k in BOUNDS))
        assert got.tolist() == case["expected"]


def test_explores_then_follows_the_priority():
    # 8 for the prompt never seen, the lower bound for all, the rest by priority
    assert waterfill(np.array([0, 16, 16]), np.array([0.0, 0.1, 0.3]), 24, 4, 24, 8).tolist() == [8, 6, 10]
    # exploring two prompts takes all but one of the budget; the third still gets its lower bound, off the first
    assert waterfill(np.array([0, 0, 30]), np.array([0.0, 0.0, 1.0]), 17, 4, 24, 8).tolist() == [6, 7, 4]
