"""Packs a step's sequences into the micro-batches of each update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.batch import MicroBatch, MiniBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.micro_batches import SequenceCost, assign_micro_batches
from dynamo_megatron.types import Sequences


class Packer:
    """Packs one rank's part."""

    def __init__(self, spec: ModelSpec, config: Config, layout: Layout):
        self._config, self._layout = config, layout
        self._cost = SequenceCost.of_model(spec)

    def pack(self, source: Sequences, mini_batches: Sequence[np.ndarray]) -> list[MiniBatch]:
        """Returns this rank's part of each of `mini_batches` (indices of sequences, ascending)."""
        parallel, budget = self._config.parallel, self._config.trainer.micro_batch_tokens
        lengths, dp = np.diff(source.offsets) - 1, self._layout.dp
        multiple = parallel.pp if parallel.vpp > 1 else 1
        packed = []
        for members in mini_batches:
            assigned = assign_micro_batches(
                lengths[members].tolist(), dp.size(), budget, cost=self._cost, multiple=multiple
            )
            micro_batches = [self._micro_batch(source, members[micro]) for micro in assigned[dp.rank()]]
            packed.append(MiniBatch(members, micro_batches))
        return packed

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
