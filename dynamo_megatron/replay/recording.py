"""The record that allocators are replayed on: what was sampled in each step of a run, or of another trainer's dump:
verl's `trainer.rollout_data_dir`, slime's `--save-debug-rollout-data`."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.run_record import read_config
from dynamo_megatron.rollout.store import read_groups, step_file
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import LARGEST_REWARD, NOT_TRAINED


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
    trainer: str  # "dynamo-megatron", "verl" or "slime"
    steps: list[RecordedStep]
    allocation: dict[str, Any]  # algorithm.allocation of the run, which allocators start from
    notes: list[str] = field(default_factory=list)  # one line for each thing that was left out

    @property
    def prompt_ids(self) -> list[str]:
        """[V]: the prompt_ids of all dispatches of all steps."""
        return [prompt_id for step in self.steps for prompt_id in step.prompt_ids]


def read_record(folder: Path, threshold: float = 1.0, reward_key: str | None = None) -> Recording:
    """The record of a run (`read_run`), or of the dump of verl or slime in `folder`. A rollout of a dump succeeds where
    its reward is at least `threshold`; `reward_key` names the field with it. Raises ValueError (one line, with path and
    place) for a folder without rollouts and for a broken file."""
    if (folder / "config.yaml").is_file():
        return read_run(folder)
    if files := [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]:
        return _recording(folder, "verl", dict(_verl(path, reward_key) for path in files), threshold)
    # without the files of evaluations, which slime names eval_ID
    if files := sorted(path for path in folder.glob("*.pt") if not re.search(r"eval_\d+$", path.stem)):
        return _recording(folder, "slime", dict(_slime(path, reward_key) for path in files), threshold)
    raise InputError(
        f"{folder}: no run (config.yaml), no rollouts of verl (trainer.rollout_data_dir, STEP.jsonl) and none of slime "
        "(--save-debug-rollout-data, .pt)"
    )


def read_run(folder: Path) -> Recording:
    """The record of a run of dynamo-megatron. Failed rollouts are left out, since no allocator observed them.

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
    return Recording(folder, "dynamo-megatron", steps, config["algorithm"]["allocation"], notes)


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


# A rollout's prompt, what is the same for all rollouts of its dispatch, and its reward (None: it was not scored).
Sample = tuple[str, Hashable, float | None]


def _verl(path: Path, reward_key: str | None) -> tuple[int, list[Sample]]:
    """The step of a dump STEP.jsonl and its samples. A line is a response with `input` and `score` (or `reward_key`).
    The lines with the same input are one group."""
    rows = enumerate(read_rows(path, "input"), 1)
    samples = [(r["input"], r["input"], _reward(r, reward_key or "score", f"{path}:{n}")) for n, r in rows]
    return int(path.stem), samples


def _slime(path: Path, reward_key: str | None) -> tuple[int, list[Sample]]:
    """As `_verl`, of a file with `rollout_id` and `samples`, each with `prompt`, `group_index` and `reward` (of several
    rewards `reward_key` names one)."""
    import torch  # takes seconds

    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
        step, rows = dump["rollout_id"], dump["samples"]
    except Exception as error:  # of broken bytes it raises anything
        why = str(error).partition("\n")[0]
        raise InputError(f"{path}: no dump of slime's --save-debug-rollout-data ({why})") from None
    samples: list[Sample] = []
    for number, row in enumerate(rows):
        prompt, reward, group = (row.get(key) for key in ("prompt", "reward", "group_index"))
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
        if reward is not None:
            where, several = f"{path}: sample {number}", isinstance(reward, dict)
            if several and reward_key is None:
                raise InputError(f"{where}: its reward is {sorted(reward)}; name one of them with --reward-key")
            reward = _reward(reward, reward_key, where) if several else _reward(row, "reward", where)
        samples.append((text, text if group is None else group, reward))
    return step, samples


def _reward(row: Mapping[str, Any], key: str, where: str) -> float:
    reward = row.get(key)
    if not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:  # also NaN
        raise InputError(f"{where}: {key!r} is {reward!r:.40}, not a finite number; --reward-key names another one")
    return float(reward)


def _recording(folder: Path, trainer: str, steps: Mapping[int, Sequence[Sample]], threshold: float) -> Recording:
    recorded = []
    for step, samples in sorted(steps.items()):
        dispatches = {key: place for place, key in enumerate(dict.fromkeys(sample[:2] for sample in samples))}
        of = np.array([dispatches[sample[:2]] for sample in samples], np.int64)
        scored = np.array([reward is not None for *_, reward in samples], bool)
        if not scored.any():
            raise InputError(f"{folder}: no rollout of step {step} has a reward; remove its file or give --reward-key")
        rewards = np.array([reward for *_, reward in samples if reward is not None], np.float64)
        ids, given = [prompt for prompt, _ in dispatches], np.bincount(of).astype(np.int64)
        recorded.append(RecordedStep(step, ids, given, of[scored], rewards, rewards >= threshold))
    # Other trainers have no bounds, so ours are used (2 to 24 at a mean of 8) in proportion to the dump's mean count.
    mean = max(1, round(np.concatenate([step.given for step in recorded]).mean()))
    bounds = {"rollout_n_min": max(1, mean // 4), "rollout_n_max": 3 * mean, "initial_budget": mean}
    return Recording(folder, trainer, recorded, {**bounds, "on_shortfall": "scale"})
