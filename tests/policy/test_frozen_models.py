"""A pass of a frozen model that fails, in the policy's place."""

from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.policy import frozen_models
from dynamo_megatron.policy.frozen_models import FrozenModels


class Chunk:
    """One parameter, of the model that was loaded last; reading it raises `error`."""

    error: Exception | None = None

    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.zeros(1))

    def parameters(self):
        if self.error is not None:
            raise self.error
        yield self.parameter


@pytest.fixture
def frozen(monkeypatch) -> tuple[Chunk, FrozenModels]:
    def load(chunks, spec, folder, layout):
        torch.nn.init.constant_(chunks[0].parameter, {"policy": 1.0, "reference": 2.0}[folder])

    monkeypatch.setattr(frozen_models, "load_folder", load)
    chunk = Chunk()
    config = SimpleNamespace(frozen_models={"key": "reference"}, model=SimpleNamespace(path="policy"))
    return chunk, FrozenModels([chunk], None, config, None)


def test_the_policy_comes_back_after_a_pass_that_failed(frozen):
    chunk, models = frozen
    with pytest.raises(ValueError, match="the cause"), models.in_place_of_policy("reference"):
        assert chunk.parameter.item() == 2
        raise ValueError("the cause")
    assert chunk.parameter.item() == 1
    with models.in_place_of_policy("reference"):
        assert chunk.parameter.item() == 2
    assert chunk.parameter.item() == 1


def test_memory_that_is_short_again_does_not_hide_the_first_error(frozen):
    chunk, models = frozen
    with pytest.raises(torch.OutOfMemoryError, match="in the pass"), models.in_place_of_policy("reference"):
        chunk.error = torch.OutOfMemoryError("in the way back")
        raise torch.OutOfMemoryError("in the pass")


def test_a_way_back_that_fails_alone_is_raised(frozen):
    chunk, models = frozen
    with pytest.raises(torch.OutOfMemoryError, match="in the way back"), models.in_place_of_policy("reference"):
        chunk.error = torch.OutOfMemoryError("in the way back")
