"""What was sampled, step by step, whoever trained: the record that allocators are replayed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.rollout.store import read_groups, step_file
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import NOT_TRAINED


@dataclass(frozen=True)
class RecordedStep:
    """A step's N dispatches (a prompt drawn twice is two) and those S rollouts of theirs that have a reward."""

    step: int
    prompt_ids: list[str]  # [N], in the order of the batch
    given: np.ndarray  # int64 [N], rollouts asked for
    dispatch: np.ndarray  # int64 [S], which of the N a rollout belongs to
    rewards: np.ndarray  # float64 [S]
    successes: np.ndarray  # bool [S]
    energy: np.ndarray | None = None  # float64 [S], sum_t (1 - pi_t)^2 of the server: half of the energy to all of it
    lengths: np.ndarray | None = None  # int64 [S], response tokens
    version: int | None = None  # its allocation knew the steps up to this one; None: all earlier steps and rounds

    @property
    def budget(self) -> int:
        return int(self.given.sum())


@dataclass(frozen=True)
class Recording:
    """`steps`: at least one, in the order of training; the rounds of a step are several."""

    folder: Path
    trainer: str  # "dynamo-megatron", "verl" or "slime"
    steps: list[RecordedStep]
    allocation: dict[str, Any]  # the section algorithm.allocation that allocators start from; a run's own
    texts: dict[str, str] = field(default_factory=dict)  # prompt_id -> prompt, where the id is a hash of it
    notes: list[str] = field(default_factory=list)  # what was left out, one line each
    strata: dict[str, Hashable] | None = None  # prompt_id -> what algorithm.allocation.prior_by says of it

    @property
    def prompt_ids(self) -> list[str]:
        """[V], of all dispatches of all steps."""
        return [prompt_id for step in self.steps for prompt_id in step.prompt_ids]

    @property
    def step_numbers(self) -> np.ndarray:
        """int64, ascending: the training steps; with dynamic sampling one may have several `steps`, its rounds."""
        return np.unique([step.step for step in self.steps])

    @property
    def step_index(self) -> np.ndarray:
        """int64 [V]: the place in `step_numbers` of every dispatch."""
        numbers = [step.step for step in self.steps]
        return np.repeat(np.searchsorted(self.step_numbers, numbers), [len(step.prompt_ids) for step in self.steps])


def read_run(folder: Path) -> Recording:
    """The record of a run of ours. Rollouts that failed were never observed and are left out.

    A run on recorded rollouts (`rollout.engine=recorded`) has them in the folder that it names. A last step whose
    allocation was torn by a kill is left out. Raises ValueError for what is missing or broken.
    """
    config, notes = read_config(folder), []
    rows = list(read_rows(folder / "allocation.jsonl", "step", "prompt_id", "n"))
    by_step = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    whole = by_step and (folder / "allocation.jsonl").read_bytes().endswith(b"\n")
    if by_step and not (whole and len(by_step[-1]) >= _prompts_of(folder, config, by_step[-1][0]["step"])):
        notes.append(f"Step {by_step.pop()[0]['step']} is left out: a kill tore its allocation.")
    if not by_step:
        raise InputError(f"{folder}: no step in allocation.jsonl; a replay needs at least one finished step of train")
    source = Path(config["rollout"]["recorded"] or folder)
    steps = [part for rows in by_step for part in _read_step(source, rows)]
    strata = {row["prompt_id"]: row["stratum"] for row in rows} if "stratum" in rows[0] else None
    return Recording(folder, "dynamo-megatron", steps, config["algorithm"]["allocation"], notes=notes, strata=strata)


def _prompts_of(folder: Path, config: dict[str, Any], step: int) -> int:
    """That `step` has drawn at least."""
    if (prompts := config["data"]["batch_prompts"]) != "auto":
        return prompts
    rows = read_rows(folder / "metrics.jsonl", "step", "allocation/prompts")
    return next((row["allocation/prompts"] for row in rows if row["step"] == step), 0)


def _read_step(source: Path, rows: list[dict[str, Any]]) -> Iterator[RecordedStep]:
    """The rounds of a step, one without dynamic sampling: each was observed before the next was allocated.

    The k-th dispatch of a prompt is its k-th group, of which it has the first n rollouts (as `RecordedRollouts`).
    """
    step = rows[0]["step"]
    path = step_file(source, step)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; a replay needs the rollouts of every step in allocation.jsonl, and the run may "
            "have removed the oldest (rollout.keep_last)"
        )
    groups, drawn = read_groups(path), Counter()
    for _, part in groupby(rows, key=lambda row: row.get("round", 0)):
        dispatches, observed = list(part), []
        for index, row in enumerate(dispatches):
            prompt_id, n = row["prompt_id"], row["n"]
            occurrence = drawn[prompt_id]
            drawn[prompt_id] += 1
            group = groups[prompt_id][occurrence] if occurrence < len(groups.get(prompt_id, [])) else []
            if len(group) < n:
                raise InputError(
                    f"{path}: {len(group)} rollouts of prompt {prompt_id!r}, allocation.jsonl says {n}; "
                    "copy the whole folder of the run"
                )
            observed.extend((index, r) for r in group[:n] if r.status not in NOT_TRAINED)
        rollouts = [rollout for _, rollout in observed]
        yield RecordedStep(
            step=step,
            prompt_ids=[row["prompt_id"] for row in dispatches],
            given=np.array([row["n"] for row in dispatches], np.int64),
            dispatch=np.array([index for index, _ in observed], np.int64),
            rewards=np.array([rollout.reward for rollout in rollouts], np.float64),
            successes=np.array([rollout.success for rollout in rollouts], bool),
            energy=np.array([((1 - np.exp(r.engine_logprobs)) ** 2).sum() for r in rollouts], np.float64),
            lengths=np.array([len(rollout.engine_logprobs) for rollout in rollouts], np.int64),
            version=dispatches[0].get("version"),
        )
