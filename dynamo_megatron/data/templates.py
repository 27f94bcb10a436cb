"""From a prompt to the tokens that the model sees."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.data.sources import NEEDS_CHAT, WAYS
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# For a tokenizer without a template of its own; a base model continues it as a text.
PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{{ message['content'] + '\n\n' }}"
    "{%- else -%}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
# What chat templates that print the date (Llama 3.2, SmolLM3) are told: with the clock's, a run that is resumed on
# another day would have other prompts.
DATE = datetime.datetime(2026, 1, 1)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tiktoken.model")


def load_tokenizer(
    path: str | Path, chat_template: str | None = None, key: str = "model.path"
) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, with the chat template that `data.chat_template` names; None: its own.
    `key` names the folder in messages. Raises ValueError (one line) without a tokenizer, or for a missing file."""
    from transformers import AutoTokenizer  # seconds of import that the reward workers and the config do not need

    # Asked for here, because transformers makes an empty tokenizer from a folder that only has a config.json.
    if not any((Path(path) / name).is_file() for name in VOCABULARY_FILES):
        raise InputError(f"{key}: {path} has no tokenizer (looked for {', '.join(VOCABULARY_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # None would ask on a terminal
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RecursionError) as error:
        text = on_one_line(str(error), 500)
        raise InputError(f"{key}: cannot load the tokenizer of {path}: {type(error).__name__}: {text}") from error
    if chat_template == "plain":
        # A rendered chat is encoded without the special tokens that the tokenizer begins a text with.
        begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[0] == tokenizer.bos_token_id
        tokenizer.chat_template = ("{{- bos_token -}}" if begins else "") + PLAIN
    elif chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(f"data.chat_template: {chat_template}: {why}; give a Jinja file, or plain") from None
    return tokenizer


def decoder_of(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The part of a tokenizer that decodes as it does itself, and that needs neither transformers nor torch; None for a
    tokenizer that has none."""
    from transformers import PreTrainedTokenizerFast

    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    )
    return tokenizer.backend_tokenizer if plain and not tokenizer.clean_up_tokenization_spaces else None


SERVERS_ENDS = ("<|eom_id|>", "<|ifm|im_end|>", "<|content_model_end_sampling|>")


def end_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: as on SGLang's servers those of generation_config.json, config.json and
    SERVERS_ENDS, and the tokenizer's. Raises InputError for what is no token id, and where there is none."""
    added = tokenizer.get_added_vocab()
    ends = {added[text] for text in SERVERS_ENDS if text in added}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        said = plain_json.read_object(file).get("eos_token_id") if file.is_file() else None
        if said is not None:
            ids = said if isinstance(said, list) else [said]
            if not all(type(end) is int and end >= 0 for end in ids):
                raise InputError(f"{file}: eos_token_id: {said!r:.80} is neither a token id nor a list of them")
            ends.update(ids)
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    if not ends:
        raise InputError(f"model.path: {path} names no end token (eos_token_id in generation_config.json)")
    return sorted(ends)


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig, tools: list[Any] | None = None
) -> list[int]:
    """The token ids of `prompt` under `config.template`; `tools`: those that a chat offers, in OpenAI's form.

    "chat": the tokenizer's chat template up to where the assistant begins. Else `config.few_shot` + the template with
    {prompt} replaced, encoded with the tokenizer's own special tokens (a BOS, where it has one). Raises ValueError
    naming the prompt: the chat template is missing or fails on it, or no tokens come out.
    """
    if config.template == "chat":
        tokens = _chat_tokens(prompt, tokenizer, config, tools)
    elif prompt.text is None:
        raise InputError(f"prompt {prompt.prompt_id!r}: {NEEDS_CHAT}")
    else:
        # str.format would trip over the braces of LaTeX.
        tokens = encode_text(config.few_shot + config.template.replace("{prompt}", prompt.text), tokenizer)
    if not tokens:
        raise InputError(f"prompt {prompt.prompt_id!r}: the tokenizer gives no tokens for it")
    return tokens


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of `text` after the tokenizer's own special tokens, with one BOS where the text begins with one, too."""
    tokens, bos = tokenizer.encode(text), tokenizer.bos_token_id
    return tokens[1:] if bos is not None and tokens[:2] == [bos, bos] else tokens


def rendered_warning(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[str]:
    """A line where `prompt` seems to be rendered by a chat template already, and the run puts its own around it."""
    found = [token for token in tokenizer.all_special_tokens if token and token in (prompt.text or "")]
    if config.template != "chat" or not found:
        return []
    return [
        f"the text of prompt {prompt.label} has {found[0]}, and the chat template is put around it; if the prompts are "
        "rendered already, set data.template='{prompt}'"
    ]


def chat_messages(prompt: Prompt, system_prompt: str | None) -> list[dict[str, Any]]:
    """The conversation that `prompt` begins; `system_prompt` goes first unless it has one of its own."""
    messages = prompt.messages if prompt.messages is not None else [{"role": "user", "content": prompt.text}]
    if system_prompt is not None and (not messages or messages[0]["role"] != "system"):
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _chat_tokens(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: DataConfig, tools: list[Any] | None
) -> list[int]:
    if tokenizer.chat_template is None:
        otherwise = "" if prompt.text is None else ", or data.template to a text with {prompt} in it"
        raise InputError(
            f"data.template: the tokenizer of {tokenizer.name_or_path} has no chat template; set {WAYS}{otherwise}"
        )
    if unknown := [name for name in config.template_args if name not in str(tokenizer.chat_template)]:
        raise InputError(
            f"data.template_args: the chat template of {config.chat_template or tokenizer.name_or_path} has no "
            f"{unknown[0]}"
        )
    messages, variables = chat_messages(prompt, config.system_prompt), template_variables(config)
    try:
        return rendered_ids(tokenizer, [with_objects(message) for message in messages], tools, variables)
    except (TemplateError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f"prompt {prompt.prompt_id!r}: the chat template of {config.chat_template or tokenizer.name_or_path} fails "
            f"on it: {error_line(error)}"
        ) from error


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of tool calls, which are JSON texts in OpenAI's format, as objects (`plain_json.ReadObject`),
    which most chat templates expect."""

    def read(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return call | {"function": function | {"arguments": plain_json.object_in(function["arguments"])}}

    calls = message.get("tool_calls")
    return message | {"tool_calls": [read(call) for call in calls]} if isinstance(calls, list) else message


def rendered_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any] | None, variables: Mapping[str, Any]
) -> list[int]:
    """The token ids of a conversation, up to where the assistant begins. Raises what the chat template does."""
    given = {"tools": tools, "add_generation_prompt": True, **variables}
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **given)["input_ids"])


def template_variables(config: DataConfig) -> dict[str, Any]:
    """What a chat template is rendered with, besides the conversation."""
    return {"strftime_now": DATE.strftime, **config.template_args}


def max_prompt_length(config: Config, spec: ModelSpec, *, evaluation: bool = False) -> int:
    """The largest number of prompt tokens: `data.max_prompt_length`, which does not count in an evaluation, else the
    model's length less the response limit.

    Raises ValueError where prompt and response together exceed the model's length, or `model.max_length` does.
    """
    limit = config.model.max_length or spec.max_positions
    if limit > spec.max_positions:
        raise InputError(
            f"model.max_length: {limit} tokens is above the model's {spec.max_positions} (max_position_embeddings in "
            "config.json, to be raised there for a RoPE scaling that extends it)"
        )
    key, response = "rollout.max_new_tokens", config.rollout.max_new_tokens
    if evaluation and config.eval.max_new_tokens is not None:
        key, response = "eval.max_new_tokens", config.eval.max_new_tokens
    room = limit - response
    given = None if evaluation else config.data.max_prompt_length
    asked = given or room
    if room < 1 or asked > room:
        raise InputError(
            f"{key}: {response} tokens leave {max(0, room)} of {limit} for the "
            f"prompt{f', data.max_prompt_length asks for {asked}' if given else ''}"
        )
    return asked


def longest_sequence(config: Config, spec: ModelSpec) -> int:
    """Tokens that a sequence may have in training. Raises ValueError as `max_prompt_length`."""
    most, length = max_prompt_length(config, spec) + config.rollout.max_new_tokens, config.model.max_length
    if config.rollout.agent is None:
        return most
    return min(length or spec.max_positions, config.rollout.agent_tokens or spec.max_positions)
