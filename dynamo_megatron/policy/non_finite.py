"""What is reported, and kept for `replay --step`, if a pass of the policy gives NaN or infinity. Needs no Megatron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.errors import StatedError
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.adapters import is_adapter, weight_of
from dynamo_megatron.models.mapping import global_name, huggingface_names
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.policy.model import PolicyModel

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)  # the product of two larger ones is infinite, as in q k


class NonFiniteError(StatedError):
    """A token statistic, loss or gradient norm that is NaN or infinite, or weights that an optimizer step left so;
    raised on every rank. `inputs`: the inputs of the pass, before whose optimizer step it is raised; None for weights.
    """

    def __init__(self, message: str, inputs: PassInputs | None):
        super().__init__(message)
        self.inputs = inputs


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a pass besides the weights, the same on every rank. S sequences with R response tokens in all."""

    # of Policy
    method: Literal["token_stats", "reference_logprobs", "teacher_logprobs", "implicit_rewards", "update", "fit"]
    sequences: Sequences  # a RolloutBatch unless `fit`
    rows: list[np.ndarray]  # the sequences (indices, ascending) of each mini-batch
    given: dict[str, Any] = field(default_factory=dict)  # the other arguments of `update` and `fit`, by name

    def save(self, file: Path) -> None:
        torch.save(vars(self), file)

    @classmethod
    def load(cls, file: Path) -> PassInputs:
        """Reads what `save` has written, and refuses any other type, since unpickling may run code."""
        types = [type(np.dtype(name)) for name in ("i8", "i4", "f8", "f4", "?", "u1", "u2")]
        arrays = [np.ndarray, np.memmap, np.dtype, np._core.multiarray._reconstruct]
        with torch.serialization.safe_globals([Sequences, RolloutBatch, TrainBatch, TokenStats, *arrays, *types]):
            return cls(**torch.load(file, weights_only=True))

    def faults(self) -> list[str]:
        """Describes which inputs are NaN or infinite, a few words each."""
        sequences, batch, found = self.sequences, self.given.get("batch"), []
        weights = self.given.get("weights") if batch is None else batch.weights
        inputs = {
            "advantage": None if batch is None else sequences.per_token(batch.advantages),
            "token weight": None if weights is None else sequences.per_token(weights),
            "engine logprob": getattr(sequences, "engine_logprobs", None),
            "process reward, teacher's logprob or value": None if batch is None else batch.process,
        }
        for name, values in inputs.items():
            if values is not None and len(bad := self._sequences_of(~np.isfinite(values))):
                more = f", and of {len(bad) - 1} more" if len(bad) > 1 else ""
                found.append(f"the {name} of {sequences.name(bad[0])} is NaN or infinite{more}")
        return found

    def bad_statistics(self, statistics: Tensor, model: str) -> str:
        """Describes which of the `statistics` (float32 [4, R]) of a pass of `model` are NaN or infinite."""
        bad = self._sequences_of(~torch.isfinite(statistics).all(0).numpy())
        return (
            f"NaN or infinite logprobs or entropy of the {model} in {len(bad)} of {len(self.sequences.prompt_ids)} "
            f"responses; the first: {self.sequences.name(bad[0])}"
        )

    def _sequences_of(self, chosen: np.ndarray) -> list[int]:
        """The sequences that the chosen response tokens (bool [R]) belong to, ascending."""
        owners = np.searchsorted(self.sequences.response_offsets, np.flatnonzero(chosen), side="right") - 1
        return np.unique(owners).tolist()


def broken_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, layout: Layout) -> str | None:
    """Names the first weight that is NaN, infinite or above LARGEST_WEIGHT, on the first rank that has one; None if
    there is none. Collective over all ranks; reads all parameters, with one wait for the device."""
    experts = spec.experts_of(layout.ep.rank(), layout.ep.size())
    named = [(chunk, name, p) for chunk in chunks for name, p in chunk.named_parameters() if p.numel()]
    norms = [torch.linalg.vector_norm(p.detach(), math.inf).float() for *_, p in named]
    largest = torch.stack(norms).tolist() if norms else []
    first = next((place for place, value in enumerate(largest) if not value <= LARGEST_WEIGHT), None)  # NaN is not
    mine = ""
    if first is not None:
        chunk, name, _ = named[first]
        weight = global_name(weight_of(name), chunk.layer_offset, experts.start)
        mine = ("the adapter of " if is_adapter(name) else "") + " or ".join(huggingface_names(spec, weight))
    for rank, name in enumerate(layout.gather(mine)):
        if name:
            return f"NaN, infinity or values above {LARGEST_WEIGHT:.1e} in the weights of rank {rank}: {name}"
    return None
