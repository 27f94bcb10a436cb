"""The loop of supervised fine-tuning: the next examples, and an update on the cross-entropy of their completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynamo_megatron.tracking.step_metrics import spike_count
from dynamo_megatron.train import Trainer
from dynamo_megatron.training_run import RunParts
from dynamo_megatron.types import Sequences

LINES = 20  # about this many step lines are printed; metrics.jsonl has every step


class SFTTrainer(Trainer):
    """`next_examples(on_poll)` is called on rank 0 and returns a step's examples; it calls `on_poll` while it waits."""

    def __init__(self, parts: RunParts, next_examples: Callable[[Callable[[], None]], Sequences]):
        super().__init__(parts)
        self.next_examples = next_examples

    def before_first_step(self) -> None:
        if self.journal is not None:
            self.journal.progress.start(self.start)

    def train_step(self, step: int) -> None:
        self.phases.begin("read data")
        if self.journal is None:
            self.coordinator.pass_on_stop()
        sequences = self.on_rank_0(f"the examples of step {step}", self.draw)
        self.phases.begin("update")
        tokens, lr = int(sequences.response_lengths.sum()), self.config.learning_rate(step)
        weights = np.full(len(sequences.prompt_ids), 1.0 / tokens)  # every completion token counts the same
        update = self.policy.fit(sequences, weights, lr)
        self.policy.check_weights(lr)
        if self.journal is not None:
            self.log(step, tokens, lr, update)
        self.phases.clock.restart()

    def draw(self) -> Sequences:
        self.coordinator.check_stop()
        return self.next_examples(self.coordinator.check_stop)

    def evaluate_if_due(self, step: int) -> str | None:
        if self.config.trainer.stop_when is None:
            return None
        return self.on_rank_0(f"the end of step {step}", lambda: self.journal.finished())

    def log(self, step: int, tokens: int, lr: float, update: dict[str, float]) -> None:
        clock, steps = self.phases.clock, self.config.trainer.steps
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
