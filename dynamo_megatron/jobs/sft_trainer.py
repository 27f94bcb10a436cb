"""The loop of supervised fine-tuning: the next examples, and an update on the cross-entropy of their completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamo_megatron.jobs.training_run import TrainingRun
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.tracking.step_metrics import spike_count
from dynamo_megatron.types import Sequences

LINES = 20  # about this many step lines are printed; metrics.jsonl has every step


class SFTTrainer:
    """`next_examples(on_poll)` is called on rank 0 and returns a step's examples; it calls `on_poll` while it waits.
    `journal`: rank 0's."""

    def __init__(
        self,
        run: TrainingRun,
        journal: Journal | None,
        next_examples: Callable[[Callable[[], None]], Sequences],
    ):
        self.run, self.config, self.journal, self.next_examples = run, run.config, journal, next_examples

    def train(self) -> None:
        """Trains until `trainer.steps` or `trainer.stop_when`."""
        run = self.run
        if self.journal is not None:
            self.journal.progress.start(run.start)
        run.phases.clock.restart()
        run.save()  # finishes an interrupted export
        stop_reason = self.stop_reason(run.start)
        for step in range(run.start + 1, self.config.trainer.steps + 1):
            if stop_reason is not None:
                break
            run.begin_step(step)
            self.train_step(step)
            run.reached(step)
            stop_reason = self.stop_reason(step)
            run.save_if_due(step, stop_reason)

    def train_step(self, step: int) -> None:
        phases, policy, coordinator = self.run.phases, self.run.policy, self.run.coordinator
        phases.begin("read data")
        if self.journal is None:
            coordinator.pass_on_stop()
        sequences = self.run.on_rank_0(f"the examples of step {step}", self.draw)
        phases.begin("update")
        tokens, lr = int(sequences.response_lengths.sum()), self.config.learning_rate(step)
        weights = np.full(len(sequences.prompt_ids), 1.0 / tokens)  # every completion token counts the same
        update = policy.fit(sequences, weights, lr)
        policy.check_weights(lr)
        if self.journal is not None:
            self.log(step, tokens, lr, update)
        phases.clock.restart()

    def draw(self) -> Sequences:
        self.run.coordinator.check_stop()
        return self.next_examples(self.run.coordinator.check_stop)

    def stop_reason(self, step: int) -> str | None:
        if self.config.trainer.stop_when is None:
            return None
        return self.run.on_rank_0(f"the end of step {step}", lambda: self.journal.finished())

    def log(self, step: int, tokens: int, lr: float, update: dict[str, float]) -> None:
        clock, steps = self.run.phases.clock, self.config.trainer.steps
        metrics = {
            "step": step,
            "sft/loss": update["loss"],
            "sft/tokens": tokens,
            "policy/grad_norm": update["grad_norm"],
            "policy/learning_rate": lr,
            **spike_count([update], self.config),
            "time/step": clock.total,
            "time/save": clock.seconds.get("save", 0.0),
        }
        shown = step % max(1, steps // LINES) == 0 or step == steps
        self.journal.step(metrics, _line(metrics, steps) if shown else None)


def _line(metrics: dict[str, Any], steps: int) -> str:
    return (
        f"step {metrics['step']:>{len(str(steps))}}/{steps}  loss {metrics['sft/loss']:.4f}"
        f"  grad {metrics['policy/grad_norm']:.3f}  {metrics['time/step']:.2f} s"
    )
