"""The reader of torch_dist folders: damaged metadata is one line, and a read looks at the chunks near it alone."""

import random

import pytest
import torch

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
    writer.close()
    return tmp_path, whole, flat


def test_any_region_is_read(stacked):
    folder, whole, flat = stacked
    reader = TorchDistReader(folder)
    for offset, size in (((0, 0, 0, 0), (6, 5, 4, 3)), ((2, 3, 0, 0), (1, 1, 4, 3)), ((1, 2, 1, 1), (3, 2, 2, 1))):
        region = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert torch.equal(reader.read("experts", offset, size), region)
    assert torch.equal(reader.read("flat", (2,), (4,)), flat[2:6])
    with pytest.raises(ValueError, match="tensor flat: 2 of the 4 values"):
        reader.read("flat", (5,), (4,))


def test_a_read_looks_at_the_chunks_near_it_alone(stacked):
    reader = TorchDistReader(stacked[0])
    near = reader._chunks["experts"].near((2, 3, 0, 0), (1, 1, 4, 3))
    assert [tuple(chunk.offsets) for chunk in near] == [(2, 3, 0, 0), (2, 3, 2, 0)]


def test_metadata_with_a_wrong_bit_is_one_line(stacked):
    folder, dice = stacked[0], random.Random(0)
    file = folder / ".metadata"
    whole, refused = file.read_bytes(), 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        try:
            reader = TorchDistReader(folder)
            for key, stored in reader.tensors.items():
                reader.read(key, (0,) * len(stored.shape), stored.shape)
        except ValueError as error:
            assert str(error).startswith(str(folder)) and "\n" not in str(error)
            refused += 1
    assert refused > 200


def test_a_data_file_of_another_checkpoint_is_one_line(tmp_path):
    """Of the same size: only what is in it tells."""
    for name, dtype in (("a", torch.float32), ("b", torch.int32)):
        (tmp_path / name).mkdir()
        writer = TorchDistWriter(tmp_path / name)
        writer.add("w", torch.ones(4, dtype=dtype), (4,), (0,))
        writer.close()
    file = tmp_path / "a" / "__0_0.distcp"
    (tmp_path / "b" / file.name).replace(file)
    with pytest.raises(ValueError, match=rf"{file}: tensor w cannot be read \(.*torch.int32"):
        TorchDistReader(tmp_path / "a").read("w", (0,), (4,))
