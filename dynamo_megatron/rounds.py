"""The rounds in which a step samples, and the selection of the rollouts that it trains on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_jsonable_python

from dynamo_megatron.algorithm.advantages import informative
from dynamo_megatron.algorithm.allocation import Allocation
from dynamo_megatron.algorithm.sequential import NextRound, Outcomes, SequentialRule
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import RolloutResult, group_id
from dynamo_megatron.types import Prompt, RolloutBatch, plain_data


class Selection(NamedTuple):
    """The rollouts that a step trains on."""

    rows: np.ndarray  # int64 [K], ascending: indices into the rollouts of all rounds
    # Of each rollout's prompt, from earlier steps and from rollouts that are left out; None: the method uses none
    baseline: Baseline | None
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
    # Set by `generate`:
    result: RolloutResult | None = None  # `reject` takes rollouts out of it
    sampled: int = 0  # trainable rollouts, before `reject`
    kept: np.ndarray | None = None  # int64, ascending: which of the `sampled` are still in `result`
    version: int | None = None  # step of the servers' weights at dispatch; None: the step before this one
    drawing: Mapping[str, float] | None = None  # metrics of the prompt selection at dispatch; None: the current ones

    @property
    def dispatch(self) -> np.ndarray:
        """int64, for each rollout in `result`: the index of its prompt in `prompts`."""
        groups = {group_id(self.allocation.step, self.first + i): i for i in range(len(self.prompts))}
        return np.asarray([groups[g] for g in self.result.batch.group_ids], np.int64)


class RoundRules:
    """Which further rounds a step needs, and which of its rollouts it trains on: the rules of `algorithm.sequential`
    (algorithm/sequential.py) and `algorithm.dynamic_sampling`."""

    def __init__(self, config: Config) -> None:
        self._config, self._sequential = config, config.algorithm.sequential
        self._rule = None if self._sequential is None else SequentialRule(self._sequential, *config.rollout_bounds)

    def next_round(self, rounds: Sequence[Round]) -> NextRound | None:
        """Returns the round of prompts of the first round that `sequential` requires after `rounds`, if any."""
        return self._rule.next_round(_outcomes(rounds)) if self._rule is not None and rounds else None

    def missing(self, rounds: Sequence[Round], prompts: int) -> int:
        """Returns the number of groups with different rewards that a batch of `prompts` still lacks."""
        return prompts - sum(len(_informative_groups(r.result.batch)) for r in rounds)

    def complete(self, rounds: Sequence[Round], prompts: int) -> bool:
        """Whether the step needs no further round."""
        sampling = self._config.algorithm.dynamic_sampling
        refill = sampling and len(rounds) <= sampling.rounds and self.missing(rounds, prompts)
        return not refill and self.next_round(rounds) is None

    def joined(self, rounds: Sequence[Round]) -> RolloutResult:
        """Joins the results of all rounds. With `sequential` a rollout joins the group of its prompt's first round."""
        sampled = RolloutResult.join([r.result for r in rounds])
        if not self._merges(rounds):
            return sampled
        step = rounds[0].allocation.step
        groups = [group_id(step, position) for position in _outcomes(rounds).prompt.tolist()]
        return replace(sampled, batch=replace(sampled.batch, group_ids=groups))

    def select(self, rounds: Sequence[Round], sampled: RolloutBatch) -> Selection:
        """`sampled`: the batch of `joined`. If all groups have equal rewards, dynamic sampling selects all of them."""
        starts = np.cumsum([0, *(r.sampled for r in rounds)])
        kept = np.concatenate([start + r.kept for start, r in zip(starts, rounds, strict=False)])
        chosen = np.arange(len(kept))
        if self._rule is not None:
            chosen = self._rule.trained(_outcomes(rounds))
        elif self._config.algorithm.dynamic_sampling and (groups := _informative_groups(sampled)):
            chosen = np.flatnonzero([group in groups for group in sampled.group_ids])
        group_ids = [sampled.group_ids[i] for i in chosen] if self._merges(rounds) else None
        return Selection(kept[chosen], self._baseline(rounds, chosen), group_ids)

    def _baseline(self, rounds: Sequence[Round], chosen: np.ndarray) -> Baseline | None:
        """Returns the baseline of the rollouts `chosen` (indices into those of all rounds). With `sequential` it is the
        first round's: later baselines already contain rewards of the same groups."""
        if self._rule is None:
            known = [r.baseline.of(r.dispatch) for r in rounds if r.baseline is not None]
            return Baseline.join(known).of(chosen) if known else None
        known, seen = rounds[0].baseline, _outcomes(rounds)
        if self._sequential.kind == "reinforce_ada":
            left = np.setdiff1d(np.arange(len(seen.prompt)), chosen)
            rewards, prompts = np.concatenate([r.result.batch.rewards for r in rounds]), len(seen.asked)
            counts = np.bincount(seen.prompt[left], minlength=prompts)
            known = known or Baseline(np.zeros(prompts), np.zeros(prompts))
            known = known.with_rollouts(np.bincount(seen.prompt[left], rewards[left], prompts), counts)
        return None if known is None else known.of(seen.prompt[chosen])

    def _merges(self, rounds: Sequence[Round]) -> bool:
        """Whether the rollouts of a prompt in `rounds`, more than one, form one group."""
        return self._rule is not None and len(rounds) > 1


def _informative_groups(batch: RolloutBatch) -> set[str]:
    """Returns the groups with different rewards."""
    return {batch.group_ids[s] for s in np.flatnonzero(informative(batch.rewards, batch.group_ids))}


def _outcomes(rounds: Sequence[Round]) -> Outcomes:
    """Returns the outcomes of all rounds for the prompts of the first round."""
    asked = np.zeros(len(rounds[0].prompts), np.int64)
    for r in rounds:
        asked[r.origin] += r.allocation.counts
    return Outcomes(
        asked=asked,
        rounds=len(rounds),
        prompt=np.concatenate([r.origin[r.dispatch] for r in rounds]),
        success=np.concatenate([r.result.batch.successes for r in rounds]),
    )


def check_savable(prompt: Prompt, config: Config) -> None:
    """Raises InputError where a checkpoint could not hold the prompt while it is under way (`RoundsAhead`)."""
    given = [prompt.answer, prompt.meta]
    with contextlib.suppress(ValueError):  # of comparing NumPy's arrays
        if not config.rollout.max_staleness or plain_data(given) == given:
            return
    raise InputError(
        "rollout.max_staleness: prompts under way are saved with the checkpoint, and the answer or the other "
        f"columns of prompt {prompt.label} are not plain data (JSON)"
    )


class RoundsAhead:
    """The first round of each step that has been drawn and not yet been trained on, by step (`rollout.max_staleness`).
    Its state is plain data, and a part of the checkpoint."""

    def __init__(self) -> None:
        self.rounds: dict[int, Round] = {}

    def state_dict(self) -> dict[str, Any]:
        saved = ("prompts", "allocation", "baseline", "version", "drawing")
        rounds = {str(step): {name: getattr(r, name) for name in saved} for step, r in self.rounds.items()}
        return {"rounds": to_jsonable_python(rounds, fallback=np.ndarray.tolist)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for step, plain in state["rounds"].items():
            prompts = [Prompt(**fields) for fields in plain["prompts"]]
            allocation = Allocation(**_arrays(plain["allocation"]))
            baseline = plain["baseline"] and Baseline(**_arrays(plain["baseline"]))
            late = {"version": plain["version"], "drawing": plain["drawing"]}
            self.rounds[int(step)] = Round(prompts, allocation, baseline, 0, np.arange(len(prompts)), **late)


ARRAYS = ("counts", "variance", "history", "mean", "strength")


def _arrays(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(v) if name in ARRAYS and v is not None else v for name, v in fields.items()}
