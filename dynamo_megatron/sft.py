"""`dynamo-megatron sft`: supervised fine-tuning, the cross-entropy of completions, on the policy that RL trains.

An example is a prompt (`data.prompt_key`, rendered as for rollouts) and its completion (`data.answer_key`, a text), to
which the tokenizer's end token is added. An update takes `data.batch_prompts` examples; every completion token has
the same weight.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo_megatron.config import Config
from dynamo_megatron.config_files import ConfigError
from dynamo_megatron.coordination import Coordinator, StopRequested
from dynamo_megatron.data.stream import open_stream
from dynamo_megatron.data.templates import encode_prompt, load_tokenizer
from dynamo_megatron.models import ModelSpec, open_weights
from dynamo_megatron.output_dir import OutputDir
from dynamo_megatron.preflight.model_checks import check_vocabulary
from dynamo_megatron.records import Prompt, Sequences
from dynamo_megatron.run import Job
from dynamo_megatron.tracking.journal import Journal

if TYPE_CHECKING:
    from dynamo_megatron.policy.policy import Policy

LINES = 20  # on the screen, of a run's many steps; metrics.jsonl has them all


class SFTJob(Job):
    def __init__(self, config: Config):
        super().__init__(config, OutputDir(config))
        self._stream = None

    def check(self, ranks: int) -> dict[str, Any]:
        refused = {
            "eval.every": self.config.eval.every,
            "data.max_prompt_length": self.config.data.max_prompt_length,
            "checkpoint.export_hf=best": self.config.checkpoint.export_hf == "best",
        }
        if asked := [key for key, value in refused.items() if value]:
            raise ConfigError(
                f"{asked[0]}: not for sft, which evaluates nothing and cuts prompt and completion together at "
                "model.max_length"
            )
        return {**super().check(ranks, generates=False), "examples an update": self.config.data.batch_prompts}

    def prepare(self, spec: ModelSpec) -> None:
        config = self.config
        self.journal = Journal(config)
        progress = self.journal.progress
        progress.phase("loading tokenizer")
        with open_weights(config.model.path, spec):
            pass  # opening checks every header
        self._tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        check_vocabulary(config.model.path, spec, self._tokenizer)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"model.path: the tokenizer of {config.model.path} has no end token to train on")
        longest = config.model.max_length or spec.max_positions
        progress.phase("loading data", unit="problems")
        before = self.output.stream_state()
        self._stream = open_stream(config.prompt_stream, self._encode, longest, before, progress.count)
        self.output.claim()
        if config.data.chat_template is not None:
            self.output.keep_chat_template(self._tokenizer.chat_template)

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.checkpoints import Checkpoints  # needs Megatron

        self._policy, self._coordinator = policy, coordinator
        say = self.journal.say if self._leads else None
        self._checkpoints = Checkpoints(policy, self.config, {"stream": self._stream}, say)
        self._start = self._checkpoints.resume()
        if self._leads:
            self.output.take_over(self._start)

    def run(self) -> None:
        config, steps = self.config, self.config.trainer.steps
        if self._leads:
            self.journal.open(self._start)
            self.journal.progress.start(self._start)
        self._checkpoints.save()  # makes up for an export that a kill cut off
        for step in range(self._start + 1, steps + 1):
            self._coordinator.step = step
            start = time.monotonic()
            try:
                sequences, finished = self._share(step)
            except StopRequested:
                self._checkpoints.save()
                self._checkpoints.settle()
                raise
            if finished:
                self._checkpoints.save()
                break
            tokens = int(sequences.response_lengths.sum())
            weights = np.full(len(sequences.prompt_ids), 1.0 / tokens)
            lr = config.learning_rate(step)
            update = self._policy.fit(sequences, weights, lr)
            if self._leads:
                metrics = {
                    "step": step,
                    "sft/loss": update["loss"],
                    "sft/tokens": tokens,
                    "policy/grad_norm": update["grad_norm"],
                    "policy/learning_rate": lr,
                    "time/step": time.monotonic() - start,
                    "time/save": self._checkpoints.take_waited(),
                }
                shown = step % max(1, steps // LINES) == 0 or step == steps
                self.journal.step(metrics, _line(metrics, steps) if shown else None)
            self._checkpoints.reached(step)
            every = config.checkpoint.every
            if every and (step % every == 0 or step == steps):
                self._checkpoints.save()
        self._coordinator.step = max(self._start, self._coordinator.step)  # the export may take as long as a step
        if self._leads:
            self.journal.progress.phase("export")
        self._checkpoints.export_final()
        if self._leads:
            self.journal.ended(self._coordinator.step)

    def _share(self, step: int) -> tuple[Sequences | None, str | None]:
        """Rank 0's next examples on every rank; or why the run is finished. Raises StopRequested on all ranks."""

        def share() -> tuple[Sequences | None, str | None]:
            self._coordinator.check_stop()
            finished = self.journal.finished()
            return None if finished else self._next(), finished

        if not self._leads:
            self._coordinator.pass_on_stop()
        what = f"the examples of step {step}"
        return self._coordinator.from_rank_0(f"examples-{step}", what, share, self._policy.layout)

    def _next(self) -> Sequences:
        self.journal.progress.phase("reading data")
        examples = self._stream.next(self.config.data.batch_prompts, self._coordinator.check_stop)
        self.journal.progress.phase("update")
        lengths = np.asarray([len(e.tokens) for e in examples])
        return Sequences(
            prompt_ids=[e.prompt_id for e in examples],
            tokens=np.concatenate([np.asarray(e.tokens, np.int64) for e in examples]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lengths=lengths - np.asarray([len(self._completion(e)) for e in examples]),
        )

    def _encode(self, example: Prompt) -> list[int]:
        return encode_prompt(example, self._tokenizer, self.config.data) + self._completion(example)

    def _completion(self, example: Prompt) -> list[int]:
        if not isinstance(example.answer, str):
            raise ValueError(
                f"data.answer_key: the completion of {example.prompt_id!r} is {example.answer!r:.40}, not a text"
            )
        return [*self._tokenizer.encode(example.answer, add_special_tokens=False), self._tokenizer.eos_token_id]

    @property
    def _leads(self) -> bool:
        return self._policy.layout.rank == 0


def _line(metrics: dict[str, Any], steps: int) -> str:
    return (
        f"step {metrics['step']:>{len(str(steps))}}/{steps}  loss {metrics['sft/loss']:.4f}"
        f"  grad {metrics['policy/grad_norm']:.3f}  {metrics['time/step']:.2f} s"
    )
