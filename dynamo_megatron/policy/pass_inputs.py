"""The inputs of a pass of the policy besides its weights, and which inputs or weights are not finite.

`replay --step` repeats the pass from these inputs (replay/step.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import global_name, huggingface_names
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel
from dynamo_megatron.types import RolloutBatch, Sequences, TokenStats

Kind = Literal["statistics", "reference", "implicit", "update", "fit"]
LARGEST_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)  # the product of two larger ones is infinite, as in q k


@dataclass(frozen=True)
class PassInputs:
    """`kind`: `statistics` of the tokens under the policy, the `reference` or the models of `implicit` rewards, an
    `update`, or a `fit` of `sft`. S sequences with R response tokens in all, the same on every rank; `sequences` is a
    RolloutBatch unless `fit`."""

    kind: Kind
    sequences: Sequences
    mini_batch: np.ndarray  # int64 [S]: the pass's mini-batch that each sequence is in; -1: none
    measured: bool = False  # the update measures the noise of its gradient
    batch: TrainBatch | None = None  # of an update
    weights: np.ndarray | None = None  # float64 [S], the weight of each response token of a sequence, of a fit
    stats: TokenStats | None = None  # float32 [R], under the weights that the step began with; of an update
    reference_logprobs: Tensor | None = None  # float32 [R]; None without a KL term
    learning_rate: float = 0.0

    @classmethod
    def of_pass(cls, sequences: Sequences, mini_batches: Sequence[np.ndarray], kind: Kind, **others: Any) -> PassInputs:
        """`mini_batches`: the sequences (indices) of each mini-batch."""
        mini_batch = np.full(len(sequences.prompt_ids), -1, np.int64)
        for number, members in enumerate(mini_batches):
            mini_batch[members] = number
        return cls(kind, sequences, mini_batch, **others)

    @property
    def rows(self) -> list[np.ndarray]:
        """The sequences (indices, ascending) of each mini-batch."""
        return [np.flatnonzero(self.mini_batch == m) for m in range(int(self.mini_batch.max(initial=-1)) + 1)]

    def faults(self) -> list[str]:
        """Describes which inputs are NaN or infinite, a few words each."""
        of_rollouts = {"token weight": self.weights}
        if self.batch is not None:
            of_rollouts = {"advantage": self.batch.advantages, "token weight": self.batch.weights}
        bad = {name: np.flatnonzero(~np.isfinite(v)) for name, v in of_rollouts.items() if v is not None}
        of_tokens = {"engine logprob": getattr(self.sequences, "engine_logprobs", None)}
        of_tokens["process reward"] = None if self.batch is None else self.batch.process
        for name, values in of_tokens.items():
            slots = np.flatnonzero(~np.isfinite([] if values is None else values))
            bad[name] = np.unique(np.searchsorted(self.sequences.response_offsets, slots, side="right") - 1)
        return [
            f"the {name} of {self.sequences.name(int(rows[0]))} is NaN or infinite"
            + (f", and of {len(rows) - 1} more" if len(rows) > 1 else "")
            for name, rows in bad.items()
            if len(rows)
        ]

    def bad_statistics(self, statistics: Tensor, model: str) -> str:
        """Describes which of the `statistics` (float32 [4, R]) of a pass of `model` are NaN or infinite."""
        slots = np.flatnonzero(~torch.isfinite(statistics).all(0).numpy())
        owners = np.unique(np.searchsorted(self.sequences.response_offsets, slots, side="right") - 1)
        return (
            f"NaN or infinite logprobs or entropy of the {model} in {len(owners)} of {len(self.sequences.prompt_ids)} "
            f"responses; the first: {self.sequences.name(int(owners[0]))}"
        )

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the state for `checkpoint.folder.write_state`."""
        tokens: dict[str, Any] = {} if self.stats is None else self.stats._asdict()
        if self.reference_logprobs is not None:
            tokens["reference_logprobs"] = self.reference_logprobs
        of_pass = ("kind", "mini_batch", "measured", "weights", "learning_rate")
        return {
            "pass": {name: getattr(self, name) for name in of_pass},
            "sequences": _fields(self.sequences),
            "batch": {} if self.batch is None else _fields(self.batch, but="rollouts"),
            "of_tokens": {name: value.numpy() for name, value in tokens.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[str, Any]]) -> PassInputs:
        """The inverse of `state`. Raises InputError if `state` is not the state of a pass."""
        try:
            of_tokens = {name: torch.from_numpy(values) for name, values in state["of_tokens"].items()}
            reference = of_tokens.pop("reference_logprobs", None)
            sequences = (Sequences if state["pass"]["kind"] == "fit" else RolloutBatch)(**state["sequences"])
            return cls(
                sequences=sequences,
                batch=TrainBatch(sequences, **state["batch"]) if state["batch"] else None,
                stats=TokenStats(**of_tokens) if of_tokens else None,
                reference_logprobs=reference,
                **state["pass"],
            )
        except (KeyError, TypeError) as error:
            raise InputError(f"not the input of a pass: {error}") from None


def _fields(record: Any, but: str = "") -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != but}


def broken_weights(chunks: Sequence[PolicyModel], spec: ModelSpec, layout: Layout) -> list[str]:
    """Describes which weights are NaN, infinite or above LARGEST_WEIGHT: for each rank that has such weights the
    Hugging Face name of the first, each name once. Collective over all ranks; reads all parameters, with one wait for
    the device."""
    experts = spec.experts_of(layout.ep.rank(), layout.ep.size())
    named = [(chunk, name, p) for chunk in chunks for name, p in chunk.named_parameters() if p.numel()]
    norms = [torch.linalg.vector_norm(p.detach(), math.inf).float() for *_, p in named]
    largest = torch.stack(norms).tolist() if norms else []
    if not layout.on_any_rank(not all(value <= LARGEST_WEIGHT for value in largest)):
        return []
    found = [
        huggingface_names(spec, global_name(name, chunk.layer_offset, experts.start))
        for (chunk, name, _), value in zip(named, largest, strict=True)
        if not value <= LARGEST_WEIGHT  # NaN is not
    ]
    first = " or ".join(found[0]) if found else ""
    more = f", and {len(found) - 1} more parameters" if len(found) > 1 else ""
    by_name: dict[str, list[tuple[int, str]]] = {}
    for rank, (name, others) in enumerate(layout.gather((first, more))):
        if name:
            by_name.setdefault(name, []).append((rank, others))
    return [
        f"NaN, infinity or values above {LARGEST_WEIGHT:.1e} in the weights of rank {ranks[0][0]}: {name}{ranks[0][1]}"
        + (f" (and on {len(ranks) - 1} more ranks)" if len(ranks) > 1 else "")
        for name, ranks in by_name.items()
    ]
