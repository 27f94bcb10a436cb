"""Reads rollout dumps of other trainers: verl's `trainer.rollout_data_dir`, slime's `--save-debug-rollout-data`."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.replay.recording import RecordedStep, Recording
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import LARGEST_REWARD

# A rollout's prompt, what is the same for all rollouts of its dispatch, and its reward (None: it was not scored).
Sample = tuple[str, Hashable, float | None]


def verl_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]


def slime_files(folder: Path) -> list[Path]:
    """The dump files of training, without those of evaluations, which slime names `eval_ID`."""
    return sorted(path for path in folder.glob("*.pt") if not re.search(r"eval_\d+$", path.stem))


def read_verl(folder: Path, threshold: float, reward_key: str | None) -> Recording:
    """The record of verl's dump, STEP.jsonl. A line is a response with `input` and `score` (or `reward_key`). The lines
    of a step with the same input are one group.

    A rollout succeeds where its reward is at least `threshold`. Raises ValueError (path:line) for a broken line.
    """
    steps = {}
    for path in verl_files(folder):
        rows = enumerate(read_rows(path, "input"), 1)
        samples = [(r["input"], r["input"], _reward(r, reward_key or "score", f"{path}:{n}")) for n, r in rows]
        steps[int(path.stem)] = samples
    return _recording(folder, "verl", steps, threshold)


def read_slime(folder: Path, threshold: float, reward_key: str | None) -> Recording:
    """The record of slime's dump. A file has `rollout_id` and `samples`, each with `prompt`, `group_index` and `reward`
    (where there are several rewards, `reward_key` names one).

    Raises ValueError as `read_verl`.
    """
    import torch  # takes seconds

    steps = {}
    for path in slime_files(folder):
        try:
            dump = torch.load(path, map_location="cpu", weights_only=True)
            step, rows = dump["rollout_id"], dump["samples"]
        except Exception as error:  # of broken bytes it raises anything
            why = str(error).partition("\n")[0]
            raise InputError(f"{path}: no dump of slime's --save-debug-rollout-data ({why})") from None
        samples = steps[step] = []
        for number, row in enumerate(rows):
            prompt, reward, group = (row.get(key) for key in ("prompt", "reward", "group_index"))
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            if reward is not None:
                where, several = f"{path}: sample {number}", isinstance(reward, dict)
                if several and reward_key is None:
                    raise InputError(f"{where}: its reward is {sorted(reward)}; name one of them with --reward-key")
                reward = _reward(reward, reward_key, where) if several else _reward(row, "reward", where)
            samples.append((text, text if group is None else group, reward))
    return _recording(folder, "slime", steps, threshold)


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
