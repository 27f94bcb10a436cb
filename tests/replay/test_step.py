"""`replay --step` on a machine with fewer GPUs than the run had ranks."""

import pytest
import torch

from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.replay.step import check_gpus


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    check_gpus(4)  # on a machine without GPUs
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2)
    with pytest.raises(ConfigError, match=r"^--ranks: 4 ranks, and here are 2 GPUs; give --ranks"):
        check_gpus(4)
