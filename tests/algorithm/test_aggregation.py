import numpy as np
import pytest
import torch

from dynamo_megatron.algorithm.aggregation import token_weights

# group a: rollouts 0 and 2, group 7: 1, 3 and 4; rollout 3 has no response
LENGTHS = np.array([2, 3, 4, 0, 1])
GROUPS = ["a", 7, "a", 7, 7]
WANT = {
    "token_mean": [1 / 10] * 3 + [0, 1 / 10],
    "sequence_mean": [1 / 10, 1 / 15, 1 / 20, 0, 1 / 5],
    "sequence_sum": [1 / 5] * 3 + [0, 1 / 5],
    "constant_length": [1 / 40] * 3 + [0, 1 / 40],
    "prompt_mean": [1 / 32, 1 / 48, 1 / 32, 0, 1 / 48],
    "prompt_token_mean": [1 / 12, 1 / 8, 1 / 12, 0, 1 / 8],
}


@pytest.mark.parametrize("mode", WANT)
def test_weights_by_hand(mode):
    got = token_weights(mode, LENGTHS, GROUPS, max_length=8)
    np.testing.assert_allclose(got, WANT[mode], rtol=1e-15)
    assert got.dtype == np.float64
    assert torch.equal(token_weights(mode, torch.tensor(LENGTHS), GROUPS, max_length=8), torch.tensor(got))


@pytest.mark.parametrize("mode", WANT)
def test_nothing_to_weigh_is_never_nan(mode):
    assert token_weights(mode, np.zeros(0, np.int64), [], max_length=8).shape == (0,)
    assert (token_weights(mode, np.zeros(3, np.int64), [0, 0, 1], max_length=8) == 0).all()
