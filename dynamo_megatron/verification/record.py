"""The files of a finished step: what it trained on, and the policy and optimizer before and after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamo_megatron.checkpoint.convert import find_checkpoint, run_config
from dynamo_megatron.checkpoint.folder import read_state, verify
from dynamo_megatron.checkpoint.torch_dist import MegatronFolder, read_common
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.errors import ConfigError, InputError
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.replay.recording import read_dispatches
from dynamo_megatron.reports.run_record import read_run
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import NOT_TRAINED, RolloutBatch
from dynamo_megatron.verification.reference import Baselines, differing


class Saved:
    """Policy and optimizer after a step; after step 0 the model that the run began with, and an optimizer without
    steps. Raises InputError (one line) where there is no such checkpoint, or it is damaged."""

    def __init__(self, run: Path, config: Config, spec: ModelSpec, step: int):
        self.dtype, self.step = getattr(torch, config.model.dtype), step
        self.groups: list[dict[str, Any]] = []
        self.folder = find_checkpoint(run, step)[1] if step else Path(config.model.path)
        self._tensors: Any = MegatronFolder(self.folder, spec) if step else open_weights(config.model.path, spec)
        if step:
            verify(self.folder)
            self.groups = read_common(self.folder)["optimizer"]["optimizer"]["param_groups"]

    def weight(self, name: str) -> torch.Tensor:
        """A tensor of the model, by its Hugging Face name, in the model's dtype."""
        return self._tensors.get(name).to(self.dtype)

    def of_optimizer(self, kind: str, name: str) -> torch.Tensor:
        """Of the tensor's master copy (`param`) or its moments (`exp_avg`, `exp_avg_sq`), float32."""
        if not self.step:
            weight = self.weight(name).float()
            return weight if kind == "param" else torch.zeros_like(weight)
        return self._tensors.get(name, f"optimizer.state.{kind}.")

    @property
    def updates(self) -> int:
        """The optimizer's step counter. Raises InputError where groups of parameters have different ones."""
        counts = {int(group["step"]) for group in self.groups}
        if len(counts) > 1:
            raise InputError(f"{self.folder}: groups of parameters have different step counters: {sorted(counts)}")
        return counts.pop() if counts else 0

    @cached_property
    def allocator(self) -> dict[str, Any] | None:
        return read_state(self.folder)["allocator"] if self.step else None


@dataclass(frozen=True)
class StepRecord:
    run: Path
    step: int
    config: Config
    spec: ModelSpec
    metrics: dict[str, Any]
    rollouts: RolloutBatch  # that were trained on

    def saved(self, step: int) -> Saved | str:
        """The state after `step`, or why there is none."""
        try:
            return Saved(self.run, self.config, self.spec, step)
        except InputError as error:
            return str(error)

    def baselines(self, before: Saved) -> Baselines | None:
        """From the state of the run's allocator. None: the method uses none."""
        from dynamo_megatron.algorithm.allocation import RolloutAllocator

        algorithm, advantage = self.config.algorithm, self.config.algorithm.advantage
        if advantage.kind != "history":
            return None
        rows = read_rows(self.run / "allocation.jsonl", "prompt_id")
        strata = {row["prompt_id"]: row["stratum"] for row in rows if "stratum" in row}  # prior_by
        allocator = RolloutAllocator(algorithm.allocation, strata or None)
        if before.allocator is not None:
            allocator.load_state_dict(before.allocator)
        ratio = None if advantage.score_ratio == "auto" else advantage.score_ratio
        known = allocator.reward_baseline(self.rollouts.prompt_ids, advantage.prior_strength, ratio)
        return Baselines(known.mean, known.strength, known.score_ratio, known.variance)


def read_step(run: Path, step: int | None) -> StepRecord:
    """The record of `step` (None: the last one that is finished). Raises InputError, one line, where `run` is no run of
    `train`, or the step is not finished or has no rollouts."""
    metrics = {row["step"]: row for row in read_run(run).metrics}
    config = run_config(run / "checkpoints" / "newest")
    number = max(metrics) if step is None else step
    if number not in metrics:
        raise ConfigError(
            f"--step: step {number} is not in {run}/metrics.jsonl, which has {min(metrics)} to {max(metrics)}"
        )
    rows = [row for row in read_rows(run / "allocation.jsonl", "step", "prompt_id", "n") if row["step"] == number]
    groups = read_dispatches(Path(config.rollout.recorded or run), rows)
    trained = [
        replace(rollout, group_id=group_id(number, place), rollout_id=rollout_id(group_id(number, place), k))
        for place, group in enumerate(groups)
        for k, rollout in enumerate(group)
        if rollout.status not in NOT_TRAINED
    ]
    batch = RolloutBatch.from_rollouts(trained)
    if config.algorithm.dynamic_sampling is not None:
        batch = batch.take(np.array(differing(batch.rewards, batch.group_ids)))
    spec = load_model_config(config.model.path, config.model.family)
    return StepRecord(run, number, config, spec, metrics[number], batch)
