"""What is reported, and kept for `replay --step`, if a pass of the policy gives NaN or infinity. Needs no Megatron."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import global_name, huggingface_names
from dynamo_megatron.policy.batch import MiniBatch, TrainBatch
from dynamo_megatron.runtime.user_code import UserFunction
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.policy.model import PolicyModel

LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)  # the product of two larger ones is infinite, as in q k


class NonFiniteError(RuntimeError):
    """A token statistic, loss or gradient norm that is NaN or infinite, or weights that an optimizer step left so;
    raised on every rank. `inputs`: the inputs of the pass, before whose optimizer step it is raised; None for weights.
    """

    def __init__(self, message: str, inputs: PassInputs | None):
        super().__init__(message)
        self.inputs = inputs


@dataclass(frozen=True)
class PassInputs:
    """The inputs of a pass besides the weights, the same on every rank. S sequences with R response tokens in all."""

    method: Literal["token_stats", "reference_logprobs", "implicit_rewards", "update", "fit"]  # of Policy
    sequences: Sequences  # a RolloutBatch unless `fit`
    rows: list[np.ndarray]  # the sequences (indices, ascending) of each mini-batch
    batch: TrainBatch | None = None  # of an update
    weights: np.ndarray | None = None  # float64 [S], the weight of each response token of a sequence, of a fit
    stats: TokenStats | None = None  # float32 [R], under the weights that the step began with; of an update
    reference_logprobs: Tensor | None = None  # float32 [R]; None without a KL term
    learning_rate: float = 0.0

    def save(self, file: Path) -> None:
        torch.save(vars(self), file)

    @classmethod
    def load(cls, file: Path) -> PassInputs:
        """Reads what `save` has written, and refuses any other type, since unpickling may run code."""
        types = [type(np.dtype(name)) for name in ("i8", "i4", "f8", "f4", "?")]
        arrays = [np.ndarray, np.memmap, np.dtype, np._core.multiarray._reconstruct]
        with torch.serialization.safe_globals([Sequences, RolloutBatch, TrainBatch, TokenStats, *arrays, *types]):
            return cls(**torch.load(file, weights_only=True))

    def owners(self, slots: np.ndarray) -> np.ndarray:
        """The sequence that each response token (index into the R) belongs to."""
        return np.searchsorted(self.sequences.response_offsets, slots, side="right") - 1

    def faults(self) -> list[str]:
        """Describes which inputs are NaN or infinite, a few words each."""
        batch, bad = self.batch, {}
        of_rollouts = {"token weight": self.weights}
        if batch is not None:
            of_rollouts = {"advantage": batch.advantages, "token weight": batch.weights}
        for name, values in of_rollouts.items():
            bad[name] = np.flatnonzero(~np.isfinite([] if values is None else values))
        of_tokens = {"engine logprob": getattr(self.sequences, "engine_logprobs", None)}
        of_tokens["process reward"] = None if batch is None else batch.process
        for name, values in of_tokens.items():
            bad[name] = np.unique(self.owners(np.flatnonzero(~np.isfinite([] if values is None else values))))
        return [
            f"the {name} of {self.sequences.name(int(rows[0]))} is NaN or infinite"
            + (f", and of {len(rows) - 1} more" if len(rows) > 1 else "")
            for name, rows in bad.items()
            if len(rows)
        ]

    def bad_statistics(self, statistics: Tensor, model: str) -> str:
        """Describes which of the `statistics` (float32 [4, R]) of a pass of `model` are NaN or infinite."""
        owners = np.unique(self.owners(np.flatnonzero(~torch.isfinite(statistics).all(0).numpy())))
        return (
            f"NaN or infinite logprobs or entropy of the {model} in {len(owners)} of {len(self.sequences.prompt_ids)} "
            f"responses; the first: {self.sequences.name(int(owners[0]))}"
        )


class Finite(NamedTuple):
    """Flags of the n tokens of a micro-batch that are trained on. They stay on their device until they are needed."""

    slots: Tensor  # int64 [n], on the CPU
    inputs: Tensor  # bool [n]: the inputs of the loss are finite
    function: Tensor  # bool [n]: the user's function's losses and derivatives are finite, or `inputs` is False


def non_finite_update(
    result: Mapping[str, float],
    found: Sequence[Finite],
    parameters: Sequence[Tensor],
    inputs: PassInputs,
    mini_batch: MiniBatch,
    layout: Layout,
    function: UserFunction | None,
) -> str:
    """The message for an update with this loss and gradient norm in `result`: which ranks and prompts it comes from;
    collective over all ranks. `found`: the flags of this rank's micro-batches. `function`: the user's loss."""

    def prompts(sequences: np.ndarray) -> set[str]:
        return {inputs.sequences.prompt_ids[s] for s in sequences}

    bad_inputs: set[str] = set()
    by_function: set[str] = set()
    for finite in found:
        owners = inputs.owners(finite.slots.numpy())
        by_function |= prompts(owners[~finite.function.cpu().numpy()])
        bad_inputs |= prompts(owners[~finite.inputs.cpu().numpy()])
    gradients_finite = all(torch.isfinite(p.main_grad).all() for p in parameters)
    trained = prompts(np.concatenate([[], *(m.sequences for m in mini_batch.micro_batches)]).astype(np.int64))
    mine = (layout.rank, gradients_finite and not bad_inputs, sorted(bad_inputs), sorted(trained), sorted(by_function))
    everyone = layout.gather(mine)
    what = f"loss {result['loss']:g}, gradient norm {result['grad_norm']:g} before the optimizer step"
    if at_fault := [x for x in everyone if x[4]]:
        assert function is not None
        where = "; ".join(f"rank {rank}, prompts {', '.join(bad)}" for rank, *_, bad in at_fault)
        what = f"{function.name} gave a loss or derivative that is NaN or infinite: {what}"
    else:
        at_fault = [x for x in everyone if x[2]] or [x for x in everyone if not x[1]] or everyone
        where = "; ".join(f"rank {rank}, prompts {', '.join(bad or prompts)}" for rank, _, bad, prompts, _ in at_fault)
    return "; ".join([f"{what}: {where}", *inputs.faults()])


def broken_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, layout: Layout) -> str | None:
    """Describes which weights are NaN, infinite or above LARGEST_WEIGHT: the Hugging Face name of the first one on the
    first rank that has any; None if there are none. Collective over all ranks; reads all parameters, with one wait for
    the device."""
    experts = spec.experts_of(layout.ep.rank(), layout.ep.size())
    named = [(chunk, name, p) for chunk in chunks for name, p in chunk.named_parameters() if p.numel()]
    norms = [torch.linalg.vector_norm(p.detach(), math.inf).float() for *_, p in named]
    largest = torch.stack(norms).tolist() if norms else []
    bad = [place for place, value in enumerate(largest) if not value <= LARGEST_WEIGHT]  # NaN is not
    if not layout.on_any_rank(bool(bad)):
        return None
    mine = ""
    if bad:
        chunk, name, _ = named[bad[0]]
        mine = " or ".join(huggingface_names(spec, global_name(name, chunk.layer_offset, experts.start)))
        mine += f", and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    (rank, first), *others = [(rank, text) for rank, text in enumerate(layout.gather(mine)) if text]
    more = f" (and on {len(others)} more ranks)" if others else ""
    return f"NaN, infinity or values above {LARGEST_WEIGHT:.1e} in the weights of rank {rank}: {first}{more}"
