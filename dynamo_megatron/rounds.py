"""The rounds in which a step samples, and the selection of the rollouts that it trains on."""

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

    rows: np.ndarray  # int64 [K], ascending: indices into the rollouts of all rounds
    # Of each rollout's prompt, from earlier steps and from rollouts that are left out; None: the method uses none
    baseline: Baseline | None
    weights: np.ndarray | None  # float64 [K], in the loss (`data.selection.weights`, `explore`); None: all are 1
    group_ids: list[str] | None = None  # [K]; None: the rollouts keep theirs

    def of(self, sampled: RolloutBatch) -> RolloutBatch:
        """Returns the selected rollouts. `sampled`: the rollouts of all rounds."""
        rollouts = sampled.take(self.rows)
        return rollouts if self.group_ids is None else replace(rollouts, group_ids=self.group_ids)


@dataclass
class Round:
    """Some of a step's prompts, and their rollouts. A step has one round, or with dynamic sampling or
    `algorithm.sequential` several."""

    prompts: list[Prompt]
    allocation: Allocation
    baseline: Baseline | None  # of each prompt, for `algorithm.advantage.kind: history`
    first: int  # position of the first prompt in the step
    origin: np.ndarray  # int64, for each prompt: its position when the step drew it; a later round may sample it again
    result: RolloutResult | None = None  # set by `generate`; `reject` takes rollouts out of it
    sampled: int = 0  # trainable rollouts, before `reject`
    kept: np.ndarray | None = None  # int64, ascending: which of the `sampled` are still in `result` after `reject`
    version: int | None = None  # step of the servers' weights at dispatch; None: the step before this one
    drawing: Mapping[str, float] | None = None  # metrics of the prompt selection at dispatch; None: the current ones

    @property
    def dispatch(self) -> np.ndarray:
        """int64, for each rollout in `result`: the index of its prompt in `prompts`."""
        return np.asarray([position_of(g) - self.first for g in self.result.batch.group_ids], np.int64)


def outcomes(rounds: Sequence[Round]) -> Outcomes:
    """Returns the outcomes of all rounds for the prompts of the first round."""
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
    """Joins the results of all rounds. `merges`: a rollout joins the group of its prompt's first round; False: it stays
    in the group of its own round."""
    sampled = RolloutResult.join([r.result for r in rounds])
    if not merges or len(rounds) == 1:
        return sampled
    step = rounds[0].allocation.step
    groups = [group_id(step, position) for position in outcomes(rounds).prompt.tolist()]
    return replace(sampled, batch=replace(sampled.batch, group_ids=groups))
