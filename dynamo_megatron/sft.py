"""`dynamo-megatron sft`: supervised fine-tuning, the cross-entropy of completions, on the policy that RL trains.

An example is a prompt (`data.prompt_key`, rendered as for rollouts) and its completion (`data.answer_key`, a text), to
which the tokenizer's end token is added. A conversation that ends with an assistant's message is both: that message is
the completion, and a column `tools` has what was offered. An update takes `data.batch_prompts` examples; every
completion token has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.data.stream import open_stream
from dynamo_megatron.data.templates import encode_prompt, load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.output_dir import OutputDir
from dynamo_megatron.preflight.model_checks import check_vocabulary
from dynamo_megatron.run import Job
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.types import Prompt, Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dynamo_megatron.policy.policy import Policy


class SFTJob(Job):
    def __init__(self, config: Config):
        super().__init__(config, OutputDir(config))
        self._stream = None

    def check(self, ranks: int) -> dict[str, Any]:
        refused = {
            "eval.every": self.config.eval.every,
            "data.max_prompt_length": self.config.data.max_prompt_length,
            "data.selection": self.config.data.selection.kind != "uniform",
            "data.batch_prompts=auto": self.config.chooses_shape,
            "data.shape.every": self.config.data.shape.every,
            "checkpoint.export_hf=best": self.config.checkpoint.export_hf == "best",
        }
        if asked := [key for key, value in refused.items() if value]:
            raise ConfigError(
                f"{asked[0]}: not for sft, which samples and evaluates nothing and cuts prompt and completion together "
                "at model.max_length"
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
            raise InputError(f"model.path: the tokenizer of {config.model.path} has no end token to train on")
        longest = config.model.max_length or spec.max_positions
        progress.phase("loading data", unit="problems")
        before = self.output.stream_state()
        self._stream = open_stream(config.prompt_stream, self._encode, longest, before, progress.count)
        self.output.claim()
        if config.data.chat_template is not None:
            self.output.keep_chat_template(self._tokenizer.chat_template)

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.checkpoints import Checkpoints  # these need Megatron
        from dynamo_megatron.phases import Phases
        from dynamo_megatron.policy.spikes import SPIKES
        from dynamo_megatron.sft_trainer import SFTTrainer
        from dynamo_megatron.training_run import RunParts

        journal, leads = self.journal, policy.layout.rank == 0
        state = {"stream": self._stream} if leads else {}
        if leads and policy.spikes is not None:
            state[SPIKES] = policy.spikes
        checkpoints = Checkpoints(policy, self.config, state, journal.say if leads else None)
        start = checkpoints.resume()
        if leads:
            self.output.take_over(start)
        phases = Phases(journal.progress if leads else None, None)
        parts = RunParts(self.config, policy, coordinator, checkpoints, phases, journal, start)
        self._trainer = SFTTrainer(parts, self._next)

    def run(self) -> None:
        self._trainer.run()

    def _next(self, on_poll: Callable[[], None]) -> Sequences:
        """The examples of the next update. `on_poll` is called while the data gives none."""
        examples = self._stream.next(self.config.data.batch_prompts, on_poll)
        lengths = np.asarray([len(e.tokens) for e in examples])
        completions = [len(completion_tokens(e, self._tokenizer)) for e in examples]
        return Sequences(
            prompt_ids=[e.prompt_id for e in examples],
            tokens=np.concatenate([np.asarray(e.tokens, np.int64) for e in examples]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lengths=lengths - np.asarray(completions),
        )

    def _encode(self, example: Prompt) -> list[int]:
        return example_tokens(example, self._tokenizer, self.config.data)


def example_tokens(example: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[int]:
    """Prompt and completion. Raises ValueError naming the example."""
    prompt, tools = example, None
    if _answer_in(example) is not None:
        prompt, tools = replace(example, messages=example.messages[:-1]), example.meta.get("tools")
    return encode_prompt(prompt, tokenizer, config, tools) + completion_tokens(example, tokenizer)


def completion_tokens(example: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Raises ValueError naming the example that has no text for it."""
    last = _answer_in(example)
    if last is not None and last.get("tool_calls"):
        raise InputError(
            f"data.prompt_key: the conversation of {example.prompt_id!r} ends with a call of a tool, not with an "
            "answer; leave it out"
        )
    text = example.answer if last is None else last["content"]
    if not isinstance(text, str):
        raise InputError(f"data.answer_key: the completion of {example.prompt_id!r} is {text!r:.40}, not a text")
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def _answer_in(example: Prompt) -> dict[str, Any] | None:
    """The answer that a conversation ends with."""
    last = example.messages[-1] if example.messages else None
    return last if last is not None and last["role"] == "assistant" else None
