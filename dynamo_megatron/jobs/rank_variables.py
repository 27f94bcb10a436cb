"""Environment variables of a training rank that CUDA and NCCL read as they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.config import Config


def rank_variables(config: Config) -> dict[str, str]:
    """Returns the variables to set; what the user has set takes precedence."""
    # SGLang's ranks have this value; an NCCL group of ranks with different values fails.
    variables = {"NCCL_CUMEM_ENABLE": "0"}
    if config.parallel.tp > 1 or config.parallel.cp > 1:
        # One queue: Megatron issues an exchange before the GEMM that hides it, and relies on that order.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables
