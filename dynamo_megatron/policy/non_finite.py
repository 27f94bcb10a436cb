"""What is reported, and kept for `replay --step`, if a pass of the policy gives NaN or infinity. Needs no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.errors import StatedError
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats


class NonFiniteError(StatedError):
    """A token statistic, loss or gradient norm that is NaN or infinite; raised on every rank, before the optimizer's
    step. `inputs`: of the pass; None: of a critic's."""

    def __init__(self, message: str, inputs: PassInputs | None):
        super().__init__(message)
        self.inputs = inputs


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a pass besides the weights, the same on every rank. S sequences with R response tokens in all."""

    sequences: Sequences  # a RolloutBatch unless `fit`
    rows: list[np.ndarray]  # the sequences (indices, ascending) of each mini-batch
    given: dict[str, Any]  # the other arguments, by name
    method: Literal["token_stats", "update", "fit"] = "token_stats"  # of Policy

    def save(self, file: Path) -> None:
        torch.save(vars(self), file)

    @classmethod
    def load(cls, file: Path) -> PassInputs:
        """Reads what `save` has written, and refuses any other type, since unpickling may run code."""
        types = [type(np.dtype(name)) for name in ("i8", "i4", "f8", "f4", "?", "u1", "u2")]
        arrays = [np.ndarray, np.memmap, np.dtype, np._core.multiarray._reconstruct]
        with torch.serialization.safe_globals([Sequences, RolloutBatch, TrainBatch, TokenStats, *arrays, *types]):
            return cls(**torch.load(file, weights_only=True))

    def bad_statistics(self, statistics: Tensor, model: str) -> str:
        """Describes which of the `statistics` (float32 [4, R]) of a pass of `model` are NaN or infinite."""
        tokens = np.flatnonzero(~torch.isfinite(statistics).all(0).numpy())
        bad = np.unique(np.searchsorted(self.sequences.response_offsets, tokens, side="right") - 1)
        return (
            f"NaN or infinite logprobs or entropy of the {model} in {len(bad)} of {len(self.sequences.prompt_ids)} "
            f"responses; the first: {self.sequences.name(int(bad[0]))}"
        )
