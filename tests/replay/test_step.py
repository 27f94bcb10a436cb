"""How many ranks `replay --step` starts."""

import pytest
import torch

from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.replay.step import local_ranks


@pytest.mark.parametrize(("gpus", "asked", "ranks"), [(0, None, 4), (0, 8, 8), (4, None, 4), (2, 2, 2), (8, 6, 6)])
def test_as_many_as_asked_for_else_as_the_run_had(monkeypatch, gpus, asked, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert local_ranks(asked, 4) == ranks


@pytest.mark.parametrize(("asked", "said"), [(None, "--ranks: the run had 4, and"), (3, "--ranks: 3, and")])
def test_more_than_there_are_gpus_are_refused(monkeypatch, asked, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"^{said} here are 2 GPUs; give --ranks"):
        local_ranks(asked, 4)
