"""Environment variables of a training rank that CUDA and NCCL read as they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.config import Config


def rank_variables(config: Config) -> dict[str, str]:
    """What the user has set comes before it."""
    # SGLang's ranks have it so; with ranks of which some have it and some not, NCCL's groups of both fail.
    variables = {"NCCL_CUMEM_ENABLE": "0"}
    if config.parallel.tp > 1 or config.parallel.cp > 1:
        # One queue: Megatron issues an exchange before the product that hides it, and relies on that order.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables
