"""The files of a finished step: what it trained on, and policy and optimizer before and after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.checkpoint.convert import find_checkpoint, run_config
from dynamo_megatron.checkpoint.folder import read_state, verify
from dynamo_megatron.checkpoint.torch_dist import COMMON_FILE, MegatronFolder
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.errors import ConfigError, InputError
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.reports.run_record import read_run
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.tracking.metrics import read_rows
from dynamo_megatron.types import Prompt, RolloutBatch
from dynamo_megatron.verification.reference import groups_of


class Saved:
    """Policy and optimizer after a step; after step 0 the model that the run began with and a new optimizer. Raises
    InputError (one line) if there is no such checkpoint, or it is damaged."""

    def __init__(self, run: Path, config: Config, spec: ModelSpec, step: int):
        self.dtype, self.step, self.allocator = getattr(torch, config.model.dtype), step, None
        self.groups: list[dict[str, Any]] = [{"step": 0}]  # the optimizer's, each with its settings and step counter
        self._tensors: Any = open_weights(config.model.path, spec) if not step else None
        if step:
            folder = find_checkpoint(run, step)[1]
            verify(folder)
            self._tensors = MegatronFolder(folder, spec)
            common = torch.load(folder / COMMON_FILE, map_location="cpu", weights_only=True)
            self.groups = common["optimizer"]["optimizer"]["param_groups"]
            self.allocator = read_state(folder)["allocator"]

    def weight(self, name: str) -> torch.Tensor:
        """A tensor of the model, by its Hugging Face name, in the model's dtype."""
        return self._tensors.get(name).to(self.dtype)

    def of_optimizer(self, kind: str, name: str) -> torch.Tensor:
        """The tensor's master copy (`param`) or its moments (`exp_avg`, `exp_avg_sq`), float32 in float64."""
        if self.step:
            return self._tensors.get(name, f"optimizer.state.{kind}.").double()
        return self.weight(name).double() * (kind == "param")


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
        if self.spec.num_experts:  # Megatron has an optimizer of their own for them
            return "the reference does not cover a mixture of experts"
        try:
            return Saved(self.run, self.config, self.spec, step)
        except InputError as error:
            return f"{error} (checkpoint.every=1 saves each step)"

    def history(self, before: Saved) -> Baseline | None:
        """What the run's allocator knew of each rollout's prompt. None: the method does not use it."""
        if (advantage := self.config.algorithm.advantage).kind != "history":
            return None
        allocator = RolloutAllocator(self.config.algorithm.allocation)
        if before.allocator is not None:
            allocator.load_state_dict(before.allocator)
        ratio = None if advantage.score_ratio == "auto" else advantage.score_ratio
        return allocator.reward_baseline(self.rollouts.prompt_ids, advantage.prior_strength, ratio)


def read_step(run: Path, step: int | None) -> StepRecord:
    """The record of `step` (None: the last that is finished). Raises InputError, one line, where `run` is no run of
    `train`, the step is not finished, or its rollouts are not there."""
    metrics = {row["step"]: row for row in read_run(run).metrics}
    config = run_config(run)
    if (number := max(metrics) if step is None else step) not in metrics:
        raise ConfigError(f"--step: {run} has no finished step {number}; it has {min(metrics)} to {max(metrics)}")
    rows = [row for row in read_rows(run / "allocation.jsonl", "step", "prompt_id", "n") if row["step"] == number]
    if config.rollout.recorded and metrics[number]["rollout/rejected"]:
        raise InputError(f"{run}: step {number} rejected some of the recorded rollouts, and no file says which")
    spec = load_model_config(config.model.path, config.model.family, config.model.source)
    rollouts = RecordedRollouts(config.rollout.recorded or run, spec.vocab_size)
    rollouts.dispatch(number, [Prompt(row["prompt_id"], text="") for row in rows], [row["n"] for row in rows])
    batch = rollouts.collect(number).batch
    if config.algorithm.dynamic_sampling is not None:  # trains on groups of different rewards, unless there are none
        differ = [s for group in groups_of(batch.group_ids) if np.ptp(batch.rewards[group]) for s in group]
        batch = batch.take(np.array(sorted(differ))) if differ else batch
    return StepRecord(run, number, config, spec, metrics[number], batch)
