"""What `sft` trains on, as token ids: a prompt with its completion, or a conversation with all the assistant's answers.

Each answer follows the ids that the policy would be given for it, and is tokenized as it would be sampled: its text and
the tokenizer's end token. So the ids of a conversation are those of an agent's episode (rollout/agents/chat_tokens.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.templates import chat_messages, encode_prompt
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.messages import BadRequest, Message, normalised_calls
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Example:
    """One sequence. `trained`: for each token whether it is trained on."""

    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def add(self, tokens: list[int], trained: bool) -> None:
        self.tokens += tokens
        self.trained += [trained] * len(tokens)


def examples_of(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    """The sequences of a row of the data.

    A conversation that ends with the assistant's message is one sequence, in which each message of the assistant is
    trained on. Where the chat template renders what is before an answer differently than it did for the answer before
    (Qwen3's drops earlier thoughts), a new sequence begins, in which only the answers from there on are trained on.
    Otherwise the completion of `prompt` is its answer. Raises ValueError naming the prompt.
    """
    if prompt.messages and prompt.messages[-1]["role"] == "assistant":
        return _conversation(prompt, tokenizer, config)
    if not isinstance(prompt.answer, str):
        raise InputError(
            f"data.answer_key: the completion of {prompt.prompt_id!r} is {prompt.answer!r:.40}, not a text"
        )
    example = Example()
    example.add(encode_prompt(prompt, tokenizer, config), False)
    example.add(_sampled(prompt.answer, tokenizer), True)
    return [example]


def _conversation(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[Example]:
    chat, tools = ChatTokens(tokenizer, [tokenizer.eos_token_id], config.template_args), _tools(prompt)
    examples: list[Example] = []
    held = 0  # messages up to the last answer
    try:
        messages = [_readable(message) for message in chat_messages(prompt, config.system_prompt)]
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, context = messages[:number], None
            if held:
                context = chat.added(messages[:held], messages[held:number], tools, tokenizer.eos_token_id)
            if context is None:
                examples.append(Example())
                context = encode_prompt(replace(prompt, messages=before), tokenizer, config, tools)
            text = chat.rendered(before, message, tools) if message.get("tool_calls") else message["content"]
            examples[-1].add(context, False)
            examples[-1].add(_sampled(text, tokenizer), True)
            held = number + 1
    except BadRequest as error:
        raise InputError(f"prompt {prompt.prompt_id!r}: {error}") from None
    return examples


def _tools(prompt: Prompt) -> list[Any] | None:
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


def _sampled(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
