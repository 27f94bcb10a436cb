"""`dynamo-megatron sft`: supervised fine-tuning, the cross-entropy of completions, on the policy that RL trains.

An example is a prompt (`data.prompt_key`, rendered as for rollouts) and its completion (`data.answer_key`, a text); or
a conversation that ends with an assistant's message, of which all of the assistant's messages are trained on, and a
column `tools` has what was offered. Each answer follows the ids that the policy would be given for it, and is tokenized
as it would be sampled: its text and the token that ends it (the chat template's if it is one of the model's end tokens,
else the tokenizer's). So the ids of a conversation are those of an agent's episode (rollout/agents/chat_tokens.py),
where an answer that was cut short has "finish_reason": "length" and its end token is not trained on. An update takes
`data.batch_prompts` examples; every trained token has the same weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dynamo_megatron.config import AlgorithmConfig, Config, DataConfig, RewardConfig
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.data.stream import open_stream
from dynamo_megatron.data.templates import (
    chat_messages,
    encode_prompt,
    end_token_ids,
    load_tokenizer,
    rendered_warning,
    template_variables,
    with_objects,
)
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.jobs.start_checks import check_vocabulary
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.reward.extraction import FINAL, MARKER, opened_thinking
from dynamo_megatron.rollout.agents.chat_tokens import MARKER_TOKENS, THOUGHTS, ChatTokens
from dynamo_megatron.rollout.agents.messages import BadRequest, Message, normalised_calls
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.coordination import Coordinator
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.types import Prompt, Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dynamo_megatron.policy.policy import Policy


LINES = 20  # about this many step lines are printed; metrics.jsonl has every step


class SFTJob(Job):
    name = "sft"  # of the command, in metrics and messages

    def __init__(self, config: Config):
        # The RL parts of a config that `train` reads too: their models, critic and schedule are not for this command.
        own = config.model_copy(update={"algorithm": AlgorithmConfig(), "reward": RewardConfig()})
        super().__init__(own, OutputDir(config))
        self._stream = None

    def check(self, ranks: int) -> dict[str, Any]:
        refused = {
            "eval.every": self.config.eval.every,
            "data.max_prompt_length": self.config.data.max_prompt_length,
            "data.selection": self.config.data.selection.kind != "uniform",
            "checkpoint.export_hf=best": self.config.checkpoint.export_hf == "best",
        }
        if asked := [key for key, value in refused.items() if value]:
            raise ConfigError(
                f"{asked[0]}: not for {self.name}, which samples and evaluates nothing and skips rows of more than "
                "model.max_length tokens"
            )
        return {**super().check(ranks), "examples an update": self.config.data.batch_prompts}

    def prepare(self, spec: ModelSpec) -> None:
        config = self.config
        self.journal = Journal(config)
        progress = self.journal.progress
        progress.phase("loading tokenizer")
        self._tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        check_vocabulary(config.model.path, spec, self._tokenizer)
        if self._tokenizer.eos_token_id is None:
            raise InputError(f"model.path: the tokenizer of {config.model.path} has no end token to train on")
        self._answers = Answers(self._tokenizer, config.data, end_token_ids(config.model.path, self._tokenizer))
        if note := self._answers.other_end():
            self.journal.say(f"warning: {note} in {config.model.path}/generation_config.json")
        if marker := self._answers.opens.strip():
            self.journal.say(f"answers that leave the chat template's {marker} open are trained as thoughts")
        longest = config.model.max_length or spec.max_positions
        progress.phase("loading data", unit="problems")
        before = self.output.stream_state()
        self._stream = open_stream(
            config.prompt_stream,
            self._encode,
            longest,
            before,
            progress.count,
            needs_answer=True,
            conversations=self.name == "sft",
        )
        for warning in rendered_warning(self._stream.prompts[0], self._tokenizer, config.data):
            self.journal.say(f"warning: {warning}")
        self.output.claim()
        if config.data.chat_template is not None:
            self.output.keep_chat_template(self._tokenizer.chat_template)

    def set_up(self, policy: Policy, coordinator: Coordinator) -> None:
        from dynamo_megatron.jobs.training_run import TrainingRun  # it needs Megatron

        self._run = TrainingRun(self, policy, coordinator, {"stream": self._stream})

    def run(self) -> None:
        self._run.carry_out(self._train)

    def _train(self) -> None:
        """Trains until `trainer.steps`."""
        run = self._run
        if self.journal is not None:
            self.journal.progress.start(run.start)
        run.phases.clock.restart()
        run.save()  # finishes an interrupted export
        for step in range(run.start + 1, self.config.trainer.steps + 1):
            run.begin_step(step)
            self._step(step)
            run.reached(step)
            run.save_if_due(step)

    def _step(self, step: int) -> None:
        phases, coordinator = self._run.phases, self._run.coordinator
        phases.begin("read data")
        if self.journal is None:
            coordinator.pass_on_stop()
        batch = self._run.on_rank_0(f"the examples of step {step}", lambda: self._next(coordinator.check_stop))
        lr = self.config.learning_rate(step)
        update, metrics = self._update(batch, lr)
        if self.journal is not None:
            self._log(step, lr, update, metrics)
        phases.clock.restart()

    def _update(self, sequences: Sequences, lr: float) -> tuple[dict[str, float], dict[str, Any]]:
        """What `Policy.fit` returns, and the metrics, the loss among them."""
        self._run.phases.begin("update")
        tokens = int(sequences.response_lengths.sum())
        weights = np.full(len(sequences.prompt_ids), 1.0 / tokens)  # every completion token counts the same
        update = self._run.policy.fit(sequences, weights, lr)
        return update, {"sft/loss": update["loss"], "sft/tokens": tokens}

    def _log(self, step: int, lr: float, update: dict[str, float], found: dict[str, Any]) -> None:
        clock, steps = self._run.phases.clock, self.config.trainer.steps
        metrics = {
            "step": step,
            **found,
            "policy/grad_norm": update["grad_norm"],
            "policy/learning_rate": lr,
            "time/step": clock.total,
            "time/save": clock.seconds.get("save", 0.0),
        }
        line = (
            f"step {step:>{len(str(steps))}}/{steps}  loss {found[f'{self.name}/loss']:.4f}"
            f"  grad {update['grad_norm']:.3f}  {clock.total:.2f} s"
        )
        shown = step % max(1, steps // LINES) == 0 or step == steps
        self.journal.step(metrics, line if shown else None)

    def _next(self, on_poll: Callable[[], None]) -> Any:
        """The examples of the next update, unless `on_poll` raises."""
        on_poll()
        prompts = self._stream.next(self.config.data.batch_prompts)
        examples = [(prompt.prompt_id, example) for prompt in prompts for example in self._examples(prompt)]
        lengths = np.asarray([len(e.tokens) for _, e in examples])
        trained = [np.asarray(e.trained) for _, e in examples]
        return Sequences(
            prompt_ids=[name for name, _ in examples],
            tokens=np.concatenate([np.asarray(e.tokens, np.int64) for _, e in examples]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lengths=lengths - np.asarray([t.sum() for t in trained]),
            trained=np.concatenate(trained),
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        """The longest of its sequences: `model.max_length` limits each."""
        return max((example.tokens for example in self._examples(prompt)), key=len)

    def _examples(self, prompt: Prompt) -> list[Example]:
        return self._answers.examples(prompt)


class Example(NamedTuple):
    """One sequence. `trained`: for each token whether it is trained on."""

    tokens: list[int]
    trained: list[bool]

    def add(self, tokens: list[int], trained: bool) -> None:
        self.tokens.extend(tokens)
        self.trained.extend([trained] * len(tokens))


class Answers:
    """Answers in rows of the data, as the policy would sample them. `ends`: the tokens that end a sampled answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, ends: Collection[int]) -> None:
        self._tokenizer, self._config, self._ends = tokenizer, config, ends
        self._chat = ChatTokens(tokenizer, ends, template_variables(config))

    def examples(self, prompt: Prompt) -> list[Example]:
        """The sequences of a row.

        A conversation that ends with the assistant's message is one sequence, in which each message of the assistant is
        trained on. Where the chat template renders what is before an answer differently than it did for the answer
        before (Qwen3's drops earlier thoughts), a new sequence begins, in which only the answers from there on are
        trained on. Otherwise the completion of `prompt` is its answer. Raises ValueError naming the prompt.
        """
        if prompt.messages and prompt.messages[-1]["role"] == "assistant":
            return self._conversation(prompt)
        if not isinstance(prompt.answer, str):
            raise InputError(f"data.answer_key: the completion of {prompt.label} is {prompt.answer!r:.40}, not text")
        example = Example([], [])
        example.add(encode_prompt(prompt, self._tokenizer, self._config), False)
        message = {"role": "assistant", "content": prompt.answer}
        before = chat_messages(prompt, self._config.system_prompt)
        example.add(self.sampled(self.text_of(prompt, before, message)), True)
        return [example]

    @cached_property
    def opens(self) -> str:
        """`opened_thinking` of what the chat template puts before each answer."""
        with contextlib.suppress(BadRequest):
            if self._config.template == "chat":
                ids = self._chat.whole([{"role": "user", "content": "1"}], None)
                return opened_thinking(self._tokenizer.decode(ids[-MARKER_TOKENS:]))
        return ""

    def sampled(self, text: str) -> list[int]:
        """The tokens of an answer: its text, without a marker that the template `opens`, and the token with which the
        template ends an answer if it is one of `ends`, or else the tokenizer's end token."""
        end, marker = self._chat.end_token, self.opens.strip()
        if marker and (own := text.lstrip()).startswith(marker):
            text = own.removeprefix(marker).removeprefix(self.opens.removeprefix(marker))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id if end is None else end]

    def other_end(self) -> str | None:
        """`ChatTokens.other_end`, and what to do about it."""
        if self._config.template != "chat" or (note := self._chat.other_end) is None:
            return None
        own = self._tokenizer.eos_token
        return f"{note}: answers are trained to end with {own}; to end them with the template's, add it to eos_token_id"

    def text_of(self, prompt: Prompt, before: list[Message], message: Message) -> str:
        """The text of the assistant's `message` after `before`, its tool calls and thoughts included, and the end of
        thoughts that the template begins, if it renders one, but not of those that were cut short, after the template's
        white space. Raises InputError where the template leaves one out."""
        content, beside = message["content"], [field for field in ("tool_calls", *THOUGHTS) if message.get(field)]
        cut = message.get("finish_reason") == "length"
        closes = self.opens and not MARKER.search(content) and not cut
        if self._config.template != "chat" and beside:
            raise InputError(f"prompt {prompt.prompt_id!r}: {' and '.join(beside)} need data.template: chat")
        if self._config.template != "chat":
            return content
        plain = self._chat.gap * bool(content and not content[0].isspace()) + content
        if not (beside or closes):
            return plain
        try:
            before = [with_objects(earlier) for earlier in before]
            text = self._chat.rendered(before, _readable(message), tools_of(prompt))
            end = FINAL.search(text) if cut and not (content or message.get("tool_calls")) else None
            return text[: end.start()].rstrip() if end else text
        except BadRequest as error:
            if not beside:  # DeepSeek-R1's template leaves the thoughts out
                return plain
            drop = f"leave {' and '.join(beside)} out of the row, or set data.chat_template or data.template_args"
            raise InputError(f"prompt {prompt.prompt_id!r}: {error}; {drop}") from None

    def _conversation(self, prompt: Prompt) -> list[Example]:
        chat, tools, examples = self._chat, tools_of(prompt), []
        held = 0  # messages up to the last answer
        try:
            messages = [_readable(message) for message in chat_messages(prompt, self._config.system_prompt)]
            greetings = _greetings(messages)
            for number, message in enumerate(messages):
                if message["role"] != "assistant" or number < greetings:
                    continue
                before, context = messages[:number], None
                if held:
                    last = examples[-1].tokens[-1]
                    context = chat.added(messages[:held], messages[held:number], tools, last)
                if context is None:
                    examples.append(Example([], []))
                    context = encode_prompt(replace(prompt, messages=before), self._tokenizer, self._config, tools)
                examples[-1].add(context, False)
                *text, end = self.sampled(self.text_of(prompt, before, message))
                examples[-1].add(text, True)
                examples[-1].add([end], message.get("finish_reason") != "length")
                held = number + 1
        except BadRequest as error:
            raise InputError(f"prompt {prompt.prompt_id!r}: {error}") from None
        if not examples:
            raise InputError(f"prompt {prompt.prompt_id!r}: no user speaks before the assistant")
        if not any(True in example.trained for example in examples):
            raise InputError(f"prompt {prompt.prompt_id!r}: nothing to train on: all answers are empty and cut short")
        return examples


def _greetings(messages: list[Message]) -> int:
    """How many messages are before the first user's, or before the first call or result of a tool if that is earlier:
    what the assistant says there answers nothing. Without a user 1: the first message has no context."""
    said = [message["role"] in ("system", "developer", "assistant") for message in messages]
    greets = [plain and not message.get("tool_calls") for plain, message in zip(said, messages, strict=True)]
    greeted = False in greets and any(message["role"] == "user" for message in messages)
    return max(1, greets.index(False)) if greeted else 1


def tools_of(prompt: Prompt) -> list[Any] | None:
    """The column `tools`, or each tool in it, may be JSON text. Raises InputError."""
    where, tools = f"prompt {prompt.prompt_id!r}: the column 'tools'", prompt.meta.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = plain_json.parse(tools, where)
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [plain_json.parse(tool, where) if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{where}: a list of tools (objects) is expected, or its JSON text, not {tools!r:.80}")
    return tools


def _readable(message: Message) -> Message:
    """With the arguments of tool calls as objects, which chat templates expect; OpenAI's format has them as text."""
    calls: Any = message.get("tool_calls")
    return message | {"tool_calls": normalised_calls(calls, "a message")} if calls else message
