"""Reads rollout dumps of other trainers: verl's `trainer.rollout_data_dir`, slime's `--save-debug-rollout-data`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.replay.recording import RecordedStep, Recording
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import LARGEST_REWARD


@dataclass(frozen=True)
class Sample:
    prompt: str
    group: Hashable  # the same for all rollouts of one dispatch
    reward: float | None  # None: there is no response, or it was not scored


def verl_files(folder: Path) -> dict[int, Path]:
    """step -> path of STEP.jsonl."""
    return {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}


def slime_files(folder: Path) -> list[Path]:
    """The dump files of training, without those of evaluations, which slime names `eval_ID`."""
    return sorted(path for path in folder.glob("*.pt") if not re.search(r"eval_\d+$", path.stem))


def read_verl(folder: Path, threshold: float, reward_key: str | None) -> Recording:
    """The record of verl's dump. A line is a response with `input` and `score` (or `reward_key`). The lines of a step
    with the same input are one group.

    A rollout succeeds where its reward is at least `threshold`. Raises ValueError (path:line) for a broken line.
    """
    key = reward_key or "score"
    steps = {}
    for step, path in verl_files(folder).items():
        samples = []
        for number, row in enumerate(read_rows(path), 1):
            where = f"{path}:{number}"
            if not isinstance(row.get("input"), str):
                raise InputError(f"{where}: no 'input'; expected a line of verl's trainer.rollout_data_dir")
            samples.append(Sample(row["input"], row["input"], _reward(row, key, where)))
        steps[step] = path, samples
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
        except Exception as error:  # of broken bytes it raises anything
            raise InputError(f"{path}: torch.load refuses it ({str(error).partition(chr(10))[0]})") from None
        if not isinstance(dump, dict) or not {"rollout_id", "samples"} <= dump.keys():
            raise InputError(f"{path}: no 'rollout_id' and 'samples'; expected slime's --save-debug-rollout-data")
        samples = []
        for number, sample in enumerate(dump["samples"]):
            where, prompt = f"{path}: sample {number}", sample.get("prompt")
            text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
            group = sample.get("group_index")
            reward = _slime_reward(sample, reward_key, where)
            samples.append(Sample(text, text if group is None else group, reward))
        steps[dump["rollout_id"]] = path, samples
    return _recording(folder, "slime", steps, threshold)


def _slime_reward(sample: dict[str, Any], key: str | None, where: str) -> float | None:
    reward = sample.get("reward")
    if reward is None:
        return None
    if not isinstance(reward, dict):
        return _reward(sample, "reward", where)
    if key is None:
        raise InputError(f"{where}: its reward is {sorted(reward)}; name one of them with --reward-key")
    return _reward(reward, key, where)


def _reward(row: dict[str, Any], key: str, where: str) -> float:
    reward = row.get(key)
    if not isinstance(reward, int | float) or not abs(reward) <= LARGEST_REWARD:  # also NaN
        raise InputError(f"{where}: {key!r} is {reward!r:.40}, not a finite number; --reward-key names another one")
    return float(reward)


def _recording(folder: Path, trainer: str, steps: dict[int, tuple[Path, list[Sample]]], threshold: float) -> Recording:
    texts: dict[str, str] = {}
    recorded = []
    for step, (path, samples) in sorted(steps.items()):
        if not any(sample.reward is not None for sample in samples):
            raise InputError(f"{path}: no rollout with a reward in it; remove the file or name the reward's key")
        recorded.append(_step(step, samples, threshold, texts))
    # Other trainers have no bounds, so ours are used (2 to 24 at a mean of 8) in proportion to the dump's mean count.
    mean = max(1, round(np.concatenate([step.given for step in recorded]).mean()))
    bounds = {"rollout_n_min": max(1, mean // 4), "rollout_n_max": 3 * mean, "initial_budget": mean}
    return Recording(folder, trainer, recorded, {**bounds, "on_shortfall": "scale"}, texts)


def _step(step: int, samples: list[Sample], threshold: float, texts: dict[str, str]) -> RecordedStep:
    places: dict[tuple[str, Hashable], int] = {}
    for sample in samples:
        places.setdefault((sample.prompt, sample.group), len(places))
    of = np.array([places[sample.prompt, sample.group] for sample in samples], np.int64)
    scored = np.array([sample.reward is not None for sample in samples])
    rewards = np.array([sample.reward for sample in samples if sample.reward is not None], np.float64)
    ids = []
    for prompt, _ in places:
        ids.append(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16])
        texts[ids[-1]] = prompt
    return RecordedStep(
        step=step,
        prompt_ids=ids,
        given=np.bincount(of, minlength=len(places)).astype(np.int64),
        dispatch=of[scored],
        rewards=rewards,
        successes=rewards >= threshold,
    )
