"""The reader of torch_dist folders: any region, and parts that are missing."""

import pytest
import torch

from dynamo_megatron.checkpoint.policy_state import boxes
from dynamo_megatron.checkpoint.torch_dist import TorchDistReader, TorchDistWriter


@pytest.fixture
def stacked(tmp_path):
    """A tensor over 6 layers and 5 experts of a matrix stored in two halves, and a flat one in two unequal parts."""
    torch.manual_seed(0)
    whole, flat = torch.rand(6, 5, 4, 3), torch.rand(7)
    writer = TorchDistWriter(tmp_path)
    for layer in range(6):
        for expert in range(5):
            for half in (0, 2):
                part = whole[layer : layer + 1, expert : expert + 1, half : half + 2]
                writer.add("experts", part, whole.shape, (layer, expert, half, 0))
    writer.add("flat", flat[:3], flat.shape, (0,))
    writer.add("flat", flat[3:], flat.shape, (3,))
    writer.add("cut", flat[:3], (7,), (0,))
    writer.close()
    return tmp_path, whole, flat


def test_any_region_is_read(stacked):
    folder, whole, flat = stacked
    reader = TorchDistReader(folder)
    for offset, size in (((0, 0, 0, 0), (6, 5, 4, 3)), ((2, 3, 0, 0), (1, 1, 4, 3)), ((1, 2, 1, 1), (3, 2, 2, 1))):
        region = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert torch.equal(reader.read("experts", offset, size), region)
    assert torch.equal(reader.read("flat", (2,), (4,)), flat[2:6])
    assert torch.equal(reader.read("cut", (1,), (2,)), flat[1:3])
    for call in (lambda: reader.read("cut", (2,), (3,)), lambda: reader.parts("cut")):
        with pytest.raises(ValueError, match=r"tensor cut: \d of \d values are stored"):
            call()


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
