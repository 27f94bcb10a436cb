"""The rounds in which a step samples, and what of them it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dynamo_megatron.algorithm.allocation import Allocation
from dynamo_megatron.algorithm.baseline import Baseline
from dynamo_megatron.algorithm.sequential import Outcomes
from dynamo_megatron.rollout.result import RolloutResult, group_id, position_of
from dynamo_megatron.types import Prompt, RolloutBatch


class Selection(NamedTuple):
    """The rollouts that a step trains on."""

    rows: np.ndarray  # int64 [K], ascending: which of all that its rounds sampled
    # Of the prompt of each, from before it was sampled, and of rollouts that are left out; None: the method uses none
    baseline: Baseline | None
    weights: np.ndarray | None  # float64 [K], of the prompt of each (`data.selection.weights`, `explore`); None: 1
    group_ids: list[str] | None = None  # [K]; None: those that the rollouts have

    def of(self, sampled: RolloutBatch) -> RolloutBatch:
        """Its rollouts. `sampled`: of all rounds."""
        rollouts = sampled.take(self.rows)
        return rollouts if self.group_ids is None else replace(rollouts, group_ids=self.group_ids)


@dataclass
class Round:
    """Some of a step's prompts, and their rollouts. A step is one round, or under dynamic sampling and
    `algorithm.sequential` several."""

    prompts: list[Prompt]
    allocation: Allocation
    baseline: Baseline | None  # of each prompt, for `algorithm.advantage.kind: history`
    first: int  # position of the first prompt in the step
    origin: np.ndarray  # int64, of each prompt: the position where the step drew it; a later round may sample it again
    result: RolloutResult | None = None  # set by `generate`; `reject` takes rollouts out of it
    sampled: int = 0  # trainable rollouts, before `reject`
    kept: np.ndarray | None = None  # int64, ascending: which of them are in `result` after `reject`
    version: int | None = None  # of the servers' weights when it was dispatched; None: those of the step before
    drawing: Mapping[str, float] | None = None  # metrics of the prompts' selection then; None: they are those of now

    @property
    def dispatch(self) -> np.ndarray:
        """int64, for each rollout in `result`: which of `prompts` it is of."""
        return np.asarray([position_of(g) - self.first for g in self.result.batch.group_ids], np.int64)


def outcomes(rounds: Sequence[Round]) -> Outcomes:
    """What the rounds have of the prompts of the first one."""
    asked = np.zeros(len(rounds[0].prompts), np.int64)
    for r in rounds:
        asked[r.origin] += r.allocation.counts
    return Outcomes(
        asked=asked,
        rounds=len(rounds),
        prompt=np.concatenate([r.origin[r.dispatch] for r in rounds]),
        round=np.repeat(np.arange(len(rounds)), [len(r.dispatch) for r in rounds]),
        success=np.concatenate([r.result.batch.successes for r in rounds]),
    )


def joined(rounds: Sequence[Round], merges: bool) -> RolloutResult:
    """Of all rounds. `merges`: a rollout is in the group of its prompt's first round, in that of its own round else."""
    sampled = RolloutResult.join([r.result for r in rounds])
    if not merges or len(rounds) == 1:
        return sampled
    step = rounds[0].allocation.step
    groups = [group_id(step, position) for position in outcomes(rounds).prompt.tolist()]
    return replace(sampled, batch=replace(sampled.batch, group_ids=groups))
