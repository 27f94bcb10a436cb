"""Token ids of a conversation, rendered by the chat template: all of it, or what follows a sampled answer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dynamo_megatron.data.templates import encode_text, rendered_ids
from dynamo_megatron.reward.extraction import FINAL, THINKING, opened_thinking, response_decoder
from dynamo_megatron.rollout.agents.messages import MALFORMED, BadRequest, Message
from dynamo_megatron.runtime.plain_text import error_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the field's name in Qwen3, OpenRouter, gpt-oss
MARKER_TOKENS = 32  # that a marker of thinking and the white space after it have at most
ANSWER = "An-answer-that-no-template-changes"  # to see what a template puts before and after an answer
SHORT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]


class ChatTokens:
    """`end_token_ids`: the tokens that end a sampled answer; `template_args`: variables of the chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Sequence[int],
        template_args: Mapping[str, Any] | None = None,
    ):
        self._tokenizer, self._ends, self._args = tokenizer, frozenset(end_token_ids), template_args or {}

    def whole(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        """Returns the ids of the conversation as `data.templates` renders a prompt: up to where the assistant begins.
        Raises BadRequest."""
        with _rendering():
            return rendered_ids(self._tokenizer, messages, tools, self._args)

    def added(
        self, held: list[Message], new: list[Message], tools: list[Message] | None, last_token: int
    ) -> list[int] | None:
        """Returns the ids that follow those of `held`, whose last message was sampled up to `last_token`: the rest of
        that turn's end that was not sampled, the messages `new`, and the beginning of the assistant's next message.

        Returns None where the template changes an answer's text, or renders `held` differently once `new` follows: then
        the ids of `held` are not the beginning of this conversation. Raises BadRequest.
        """
        before = self._text(held, tools, False)
        whole = self._text(held + new, tools, True)
        end, answer = self._turn_end, held[-1].get("content") or ""
        thoughts = THINKING.sub("", answer[: found.start()]) if (found := FINAL.search(answer)) else ""
        if end is None or not whole.startswith(before) or thoughts.strip() not in before:
            return None
        ids = end + self._encode(whole[len(before) :])
        if last_token in self._ends and last_token in end:  # DeepSeek-Coder's template puts a new line before it
            return ids[end.index(last_token) + 1 :]
        # GLM-4 ends an answer with the token that begins the next message.
        return ids[last_token in self._ends and ids[:1] == [last_token] :]

    def rendered(self, before: list[Message], answer: Message, tools: list[Message] | None) -> str:
        """Returns the text of an answer with tool calls or `THOUGHTS`, as the template renders it after `before`.
        Raises BadRequest, also where the template leaves one out, or the text beside them."""
        start, end = self._text(before, tools, True), self._turn_end_text
        whole = self._text([*before, answer], tools, False)
        text = whole[len(start) : len(whole) - len(end or "")]
        parts = [call["function"]["name"] for call in answer.get("tool_calls") or ()]
        said = FINAL.split(answer.get("content") or "")[-1]
        parts += [] if THINKING.search(said) else re.findall(r"\w+", said)  # it may be indented, or escaped
        parts += [str(answer.get(field) or "").strip() for field in THOUGHTS]
        once = all(part in text for part in parts) and len(FINAL.findall(text)) < 2
        if end is None or not (once and whole.startswith(start) and whole.endswith(end)):
            raise BadRequest(
                "messages: the chat template does not render text, tool calls or thoughts within the answer"
            )
        if THINKING.search(answer.get("content") or "") or any(parts[-len(THOUGHTS) :]):
            return text
        # Qwen3's gives a last message empty thoughts.
        return re.sub(rf"\A(?:{THINKING.pattern})\s*(?:{FINAL.pattern})\s*", "", text)

    @cached_property
    def gap(self) -> str:
        """The white space between the beginning of an answer and its text in the template; "" where the tokenizer adds
        it to every text, as SentencePiece does, and where the template fails on a short conversation."""
        try:
            start, whole = self._text(SHORT[:1], None, True), self._text(SHORT, None, False).partition(ANSWER)[0]
            by_itself = self._encode(whole + ANSWER) == self._encode(start) + self._encode(ANSWER)
        except BadRequest:
            return ""
        gap = whole.removeprefix(start)
        return gap if whole.startswith(start) and gap.isspace() and not by_itself else ""

    @property
    def closing_token(self) -> int | None:
        """The first token that the template puts after an answer; None where there is none, or the template renders no
        short conversation."""
        with contextlib.suppress(BadRequest):
            return self._turn_end[0] if self._turn_end else None
        return None

    @property
    def end_token(self) -> int | None:
        """`closing_token`; None where no sampled answer ends with it."""
        return end if (end := self.closing_token) in self._ends else None

    @property
    def other_end(self) -> str | None:
        """What to know where the template ends an answer with a special token that would not end a sampled one."""
        end = self.closing_token
        added = self._tokenizer.added_tokens_decoder.get(end)
        if end in self._ends or added is None or not added.special:
            return None
        return f"the chat template ends an answer with {added.content} ({end}), which is no end token of the model"

    def text_of(self, tokens: Sequence[int], specials: bool) -> str:
        """Returns the text of a sampled answer, without the token that ended it. `specials`: keep the other special
        tokens."""
        shown = tokens[:-1] if tokens[-1] in self._ends else tokens
        return self._tokenizer.decode(shown, skip_special_tokens=not specials)

    def scored_text_of(self, tokens: Sequence[int]) -> str:
        """As `text_of`, for reward functions: with the special tokens that mark thinking, which a chat template may not
        take in an answer."""
        return self._decode_response(tokens[:-1] if tokens[-1] in self._ends else tokens)

    def thoughts_end(self, context: Sequence[int], text: str) -> int:
        """Returns the number of characters of the thoughts at the beginning of an answer, white space after them
        included: 0 without thoughts, all of `text` if they are unfinished. `context`: the tokens before the answer."""
        if not opened_thinking(self._tokenizer.decode(context[-MARKER_TOKENS:])) and not THINKING.match(text.lstrip()):
            return 0
        found = re.search(rf"(?:{FINAL.pattern})\s*", text)
        return len(text) if found is None else found.end()

    @cached_property
    def _decode_response(self) -> Callable[[Sequence[int]], str]:
        return response_decoder(self._tokenizer)

    def encode_text(self, text: str) -> list[int]:
        """As `data.templates.encode_text`. Raises BadRequest."""
        with _rendering():
            return encode_text(text, self._tokenizer)

    @cached_property
    def _turn_end_text(self) -> str | None:
        """What the template puts after an assistant's text; None where the template changes that text."""
        _, found, end = self._text(SHORT, None, False).rpartition(ANSWER)
        return end if found else None

    @cached_property
    def _turn_end(self) -> list[int] | None:
        return None if self._turn_end_text is None else self._encode(self._turn_end_text)

    def _text(self, messages: list[Message], tools: list[Message] | None, begins_answer: bool) -> str:
        with _rendering():
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=begins_answer, tokenize=False, **self._args
            )

    def _encode(self, text: str) -> list[int]:
        with _rendering():
            return self._tokenizer.encode(text, add_special_tokens=False)


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """Around calls of the chat template and the tokenizer: an agent's text may be anything. Raises BadRequest."""
    try:
        yield
    except (TemplateError, ValueError, *MALFORMED) as error:
        raise BadRequest(f"messages: the chat template or the tokenizer fails on them: {error_line(error)}") from None
