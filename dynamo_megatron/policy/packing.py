"""Packs a step's sequences into the micro-batches of each update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamo_megatron.algorithm.gradient_noise import Split, nested_split
from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.batch import MicroBatch, MiniBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.micro_batches import SequenceCost, assign_micro_batches
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import Sequences

Assigned = list[list[list[int]]]  # data-parallel rank, micro-batch, indices of sequences


class Packer:
    """Packs one rank's part."""

    def __init__(self, spec: ModelSpec, config: Config, layout: Layout):
        self._config, self._layout = config, layout
        self._cost = SequenceCost.of_model(spec)

    def pack(self, source: Sequences, mini_batches: Sequence[np.ndarray], measured: bool = False) -> list[MiniBatch]:
        """Returns this rank's part of each of `mini_batches` (indices of sequences, ascending).

        `measured` (`source` is a RolloutBatch): the update on the first mini-batch measures the gradient noise, if the
        mini-batch has enough prompts and rollouts (`nested_split`)."""
        packed = []
        for members in mini_batches:
            split = self._split(source, members) if measured and not packed else None
            if split is None:
                lengths = self._lengths(source, members)
                parts = [self._assign(lengths, self._layout.dp.size())]
            else:
                parts = [self._assign_part(source, members, split, part) for part in range(split.parts)]
            micro_batches, ends = [], []
            for part in parts:
                micro_batches += [self._micro_batch(source, members[micro]) for micro in part[self._layout.dp.rank()]]
                ends.append(len(micro_batches))
            packed.append(MiniBatch(members, micro_batches, split, tuple(ends[:-1])))
        return packed

    def _split(self, source: Sequences, members: np.ndarray) -> Split | None:
        """Returns the split of `members`. It is the same on every rank, and when a step is repeated."""
        prompt_ids, group_ids = ([ids[s] for s in members] for ids in (source.prompt_ids, source.group_ids))
        rng = np.random.default_rng(derived_seed(self._config.seed, "gradient noise", source.rollout_ids[members[0]]))
        aggregation = self._config.algorithm.loss.aggregation
        return nested_split(prompt_ids, group_ids, aggregation, self._layout.dp.size(), rng)

    def _assign_part(self, source: Sequences, members: np.ndarray, split: Split, part: int) -> Assigned:
        """Assigns the `members` in `part`. Their ranks are the split's: ranks chosen by length would not be random."""
        ranks = []
        for rank in range(self._layout.dp.size()):
            here = np.flatnonzero((split.rank == rank) & (split.part == part))
            (assigned,) = self._assign(self._lengths(source, members[here]), 1)
            ranks.append([[int(here[i]) for i in micro] for micro in assigned])
        most = max(map(len, ranks))
        return [assigned + [[]] * (most - len(assigned)) for assigned in ranks]

    def _assign(self, lengths: list[int], ranks: int) -> Assigned:
        parallel, budget = self._config.parallel, self._config.trainer.micro_batch_tokens
        multiple = parallel.pp if parallel.vpp > 1 else 1
        return assign_micro_batches(lengths, ranks, budget, cost=self._cost, multiple=multiple)

    def _lengths(self, source: Sequences, members: np.ndarray) -> list[int]:
        return (np.diff(source.offsets)[members] - 1).tolist()

    def _micro_batch(self, source: Sequences, sequences: np.ndarray) -> MicroBatch:
        layout = self._layout
        return MicroBatch.pack(
            source,
            sequences.tolist(),
            multiple=layout.tp.size() if self._config.parallel.sequence_parallel else 1,
            device=layout.device,
            cp_rank=layout.cp.rank(),
            cp_size=layout.cp.size(),
        )
