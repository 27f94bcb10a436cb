"""A run of elements of a tensor, as boxes."""

import pytest
import torch

from dynamo_megatron.checkpoint.policy_state import boxes


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (1, 6), (6, 1), (3, 2, 4), (2, 3, 2, 2)])
def test_boxes_hold_each_element_of_a_run_once_in_order(shape):
    """For every run of elements of the tensor."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    whole = torch.arange(count).view(shape)
    for begin in range(count + 1):
        for end in range(begin, count + 1):
            found, parts = [], list(boxes(shape, begin, end))
            assert len(parts) <= max(1, 2 * len(shape) - 1)
            for offset, sizes in parts:
                assert all(sizes)
                found += whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))].flatten().tolist()
            assert found == list(range(begin, end))
