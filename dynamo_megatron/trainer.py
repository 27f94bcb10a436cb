"""The RL loop of DynaMO (arXiv 2602.19208), run by every rank; rank 0 owns prompts, allocator, rollouts and metrics."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import Config
from dynamo_megatron.coordination import Coordinator, StopRequested
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.output_dir import latest_checkpoint
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.policy.checkpoint import load_checkpoint, load_state, save_checkpoint
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.resharding.push import PushReport, export_huggingface, push_weights
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.tracking.metrics import StepLog, log_line
from dynamo_megatron.tracking.step_metrics import Clock, Collected, step_metrics


class Trainer:
    """`stream` and `rollout` (an SGLang worker or recorded rollouts) are rank 0's, None elsewhere."""

    def __init__(
        self, config: Config, policy: Policy, coordinator: Coordinator, stream: PromptStream | None, rollout: Any | None
    ):
        self.config, self.policy, self.coordinator = config, policy, coordinator
        self.layout, self.stream, self.rollout = policy.layout, stream, rollout
        self.output = Path(config.output_dir)
        self.allocator = RolloutAllocator(config.algorithm.allocation)
        self.start = self._resume()
        self.state = self._state()
        if self._leads:
            self.metrics = StepLog(self.output / "metrics.jsonl", keep_to=self.start)
            self.allocation = StepLog(self.output / "allocation.jsonl", keep_to=self.start)

    def run(self) -> None:
        """Trains to `trainer.steps`. Raises StopRequested after saving when a signal asks for it."""
        config, policy, steps = self.config, self.policy, self.config.trainer.steps
        self._say_premises()
        self._push(version=self.start)
        saved = self.start
        for step in range(self.start + 1, steps + 1):
            self.coordinator.step = step
            clock = Clock()
            batch = self._share(step, clock)
            if batch is None:
                if saved < step - 1:
                    self._save(step - 1)
                raise StopRequested(self.coordinator.stop.number)
            with clock("logprobs"):
                stats = policy.token_stats(batch)
                reference = policy.reference_logprobs(batch)
            with clock("update"):
                lr = config.learning_rate(step)
                updates = [policy.update(batch, mini, stats, reference, lr) for mini in batch.mini_batches]
            pushed = self._push(version=step)
            self.state = self._state()
            if self._leads:
                kl = reference is not None
                metrics = step_metrics(step, self.collected, batch, stats, updates, lr, pushed, clock, measures_kl=kl)
                self.metrics.write([metrics])
                print(log_line(metrics, steps), flush=True)
            if step == steps and config.checkpoint.export_hf == "final":
                export_huggingface(policy, self.output / "hf")
            if step % config.checkpoint.every == 0 or step == steps:
                self._save(step)
                saved = step

    def _say_premises(self) -> None:
        allocation, advantage = self.config.algorithm.allocation, self.config.algorithm.advantage
        if not self._leads or allocation.kind == "uniform":
            return
        print("allocation: a prompt without history gets what the pool's average prompt gets: a first pass is uniform")
        if allocation.kind == "neyman" and advantage.kind == "grpo":
            print(
                "warning: neyman allocation assumes that a mixed group's variance falls with its size, which grpo's "
                "division by the group's standard deviation undoes; set algorithm.advantage.kind=rloo"
            )

    def _collect(self, step: int, clock: Clock) -> TrainBatch:
        """Rank 0: one batch of prompts, its rollouts by the allocator's counts, their advantages."""
        prompts = self.stream.next(self.config.data.batch_prompts)
        ids = [p.prompt_id for p in prompts]
        counts = self.allocator.allocate(ids, self.config.rollout_budget, step=step)
        allocated = self.allocator.last
        with clock("generate"):
            result = self.rollout.generate(step, prompts, counts, on_poll=self.coordinator.check_stop)
        for note in result.notes:
            print(note, flush=True)
        rollouts = result.batch
        if not rollouts.rollout_ids:
            raise RolloutError(f"step {step}: none of {result.counts['requested']} rollouts can be trained on")
        self.allocator.observe(rollouts.prompt_ids, rollouts.rewards, rollouts.successes, step)
        self.allocation.write(allocated.rows())
        self.collected = Collected(allocated, result, self.stream.epoch, self.stream.skipped)
        return TrainBatch.build(rollouts, self.config)

    def _share(self, step: int, clock: Clock) -> TrainBatch | None:
        """Every rank gets rank 0's batch; None where a signal asks to stop. Others poll until it is there."""
        key, box = f"step-{step}", [None]
        if self._leads:
            try:
                self.coordinator.check_stop()
                box = [self._collect(step, clock)]
            except StopRequested as stop:
                self.coordinator.announce(key, str(stop.signal_number))
                return None
            self.coordinator.announce(key)
        else:
            said = self.coordinator.wait(key, f"the rollouts of step {step}", timeout=math.inf)
            if said != "ready":
                self.coordinator.stop.number = int(said)
                return None
        dist.broadcast_object_list(box, src=0, group=self.layout.host)
        return box[0]

    def _push(self, version: int) -> PushReport:
        check = self.coordinator.check
        report = push_weights(self.policy, self.rollout, version, self.output / "push", on_poll=check)
        if self._leads:
            self.coordinator.announce(f"pushed-{version}")
        else:
            self.coordinator.wait(f"pushed-{version}", f"the server to load the weights of step {version}", math.inf)
        return report

    @property
    def _leads(self) -> bool:
        return self.layout.rank == 0

    def _state(self) -> dict | None:
        if not self._leads:
            return None
        return {"stream": self.stream.state_dict(), "allocator": self.allocator.state_dict()}

    def _save(self, step: int) -> None:
        save_checkpoint(self.policy, self.output / "checkpoints", step, self.state, self.config.checkpoint.keep_last)

    def _resume(self) -> int:
        """Loads the newest complete checkpoint, if there is one; returns its step."""
        found = latest_checkpoint(self.output / "checkpoints")
        if found is None:
            return 0
        step, folder = found
        start = time.monotonic()
        load_checkpoint(self.policy, folder)
        if self._leads:
            state = load_state(folder)
            self.stream.load_state_dict(state["stream"])
            self.allocator.load_state_dict(state["allocator"])
            print(f"resumed from {folder} (step {step}) in {time.monotonic() - start:.1f} s", flush=True)
        return step
