"""The record that allocators are replayed on: what was sampled in each step of a run."""

from __future__ import annotations

from collections.abc import Iterator
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
    """A step's N dispatches (a prompt that is drawn twice has two), and the S rollouts of them that have a reward."""

    step: int
    prompt_ids: list[str]  # [N], in the order of the batch
    given: np.ndarray  # int64 [N], rollouts requested
    dispatch: np.ndarray  # int64 [S], index in [0, N) of the rollout's dispatch
    rewards: np.ndarray  # float64 [S]
    successes: np.ndarray  # bool [S]
    energy: np.ndarray | None = None  # float64 [S], sum_t (1 - pi_t)^2 by the server: 0.5 to 1 times the energy
    version: int | None = None  # the last step that the allocator had observed; None: all earlier steps and rounds

    @property
    def budget(self) -> int:
        return int(self.given.sum())


@dataclass(frozen=True)
class Recording:
    """`steps`: at least one entry, in the order of training; each round of a step is an entry."""

    folder: Path
    steps: list[RecordedStep]
    allocation: dict[str, Any]  # algorithm.allocation of the run
    notes: list[str] = field(default_factory=list)  # one line for each thing that was left out

    @property
    def prompt_ids(self) -> list[str]:
        """[V]: the prompt_ids of all dispatches of all steps."""
        return [prompt_id for step in self.steps for prompt_id in step.prompt_ids]


def read_run(folder: Path) -> Recording:
    """The record of the run in `folder`. Failed rollouts are left out, since no allocator observed them.

    A run on recorded rollouts (`rollout.engine=recorded`) has its rollouts in the folder that its config names. A last
    step whose lines in allocation.jsonl are incomplete after a kill is left out. Raises ValueError for a missing or
    broken file.
    """
    config, notes = read_config(folder), []
    if config["algorithm"].get("sequential"):
        notes.append(
            "Each round of algorithm.sequential is a visit of its own here: the table does not show what rounds save."
        )
    rows = list(read_rows(folder / "allocation.jsonl", "step", "prompt_id", "n"))
    by_step = [list(group) for _, group in groupby(rows, key=lambda row: row["step"])]
    whole = by_step and (folder / "allocation.jsonl").read_bytes().endswith(b"\n")
    if by_step and not (whole and len(by_step[-1]) >= config["data"]["batch_prompts"]):
        notes.append(f"Step {by_step.pop()[0]['step']} is left out: a kill tore its allocation.")
    if not by_step:
        raise InputError(f"{folder}: no step in allocation.jsonl; a replay needs at least one finished step of train")
    source = Path(config["rollout"]["recorded"] or folder)
    by_length = config["algorithm"]["loss"]["aggregation"] == "sequence_mean"
    steps = [part for rows in by_step for part in _read_step(source, rows, by_length)]
    return Recording(folder, steps, config["algorithm"]["allocation"], notes)


def _read_step(source: Path, rows: list[dict[str, Any]], by_length: bool) -> Iterator[RecordedStep]:
    """The rounds of a step, one without dynamic sampling. Each round was observed before the next was allocated.
    `by_length`: energies are of gradients that are divided by the response's length, as `Controller.observe` has them.

    The k-th dispatch of a prompt has the first n rollouts of the prompt's k-th group (as in `RecordedRollouts`).
    """
    step = rows[0]["step"]
    path = step_file(source, step)
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; a replay needs the rollouts of every step in allocation.jsonl, and the run may "
            "have removed the oldest (rollout.keep_last)"
        )
    groups = read_groups(path)
    for _, part in groupby(rows, key=lambda row: row.get("round", 0)):
        dispatches, observed = list(part), []
        for index, row in enumerate(dispatches):
            prompt_id, n = row["prompt_id"], row["n"]
            left = groups[prompt_id]  # of the dispatches from this one on
            group = left.pop(0) if left else []
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
            energy=np.array([_energy(r.engine_logprobs, by_length) for r in rollouts], np.float64),
            version=dispatches[0].get("version"),
        )


def _energy(logprobs: list[float], by_length: bool) -> float:
    divisor = max(1, len(logprobs)) ** 2 if by_length else 1
    return float(((1 - np.exp(logprobs)) ** 2).sum()) / divisor
