"""One episode's requests: what an agent asks for, in OpenAI's form, becomes turns of the episode, within its limits."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_megatron.rollout.agents.episode import Episode, Place
from dynamo_megatron.rollout.agents.messages import BadRequest, LimitReached, Message, checked_tools, normalised
from dynamo_megatron.rollout.client import Response

# What an answer is made of; other fields of a request are ignored, and named in a note of the step.
USED = {"model", "messages", "prompt", "tools", "tool_choice", "stop", "stream", "stream_options", "n"} | {
    "max_tokens",
    "max_completion_tokens",
}
MEANT_AT_ZERO = ("temperature", "top_p", "seed", "parallel_tool_calls")  # others that are 0 or false ask for nothing
# With these the answer would not be a sample of the policy, or not of the form asked for.
REFUSED = ("response_format", "logit_bias", "logprobs", "top_logprobs", "functions", "function_call", "audio")

Sample = Callable[[list[int], int, tuple[str, ...], int, int], Awaitable[Response]]
ParseTools = Callable[[str, list[Message]], Awaitable[tuple[str, list[Message]]]]


@dataclass(frozen=True)
class Limits:
    """Of an episode: turns, and sampled tokens. `length`: tokens of a segment. `vocab_size`: rows of its
    embedding. `trained`: tokens of all segments together, their contexts included. `stops`: whether requests may have
    stop texts."""

    turns: int
    tokens: int
    length: int
    vocab_size: int
    trained: int
    stops: bool = True


@dataclass
class Session:
    """`sample(token ids, most new tokens, stop texts, number of the turn, how many of the ids a turn before had)` asks
    a server; `parse_tools(text, tools)` gives the text without tool calls, and these in OpenAI's form."""

    episode: Episode
    limits: Limits
    sample: Sample
    parse_tools: ParseTools
    started: float = field(default_factory=time.monotonic)
    failure: str = ""  # why a turn got no answer: the episode cannot go on
    reached: set[str] = field(default_factory=set)  # limits: turns, tokens, context, size
    ignored: Counter[str] = field(default_factory=Counter)  # fields of requests
    texts: list[str] = field(default_factory=list)  # of the answers
    ended: bool = False  # requests that come, or that wait for another one, are refused
    _begun: int = 0  # turns
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: what is left of a limit is then exact

    async def chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion. Raises BadRequest."""
        self._check(request)
        messages, tools = normalised(request.get("messages")), checked_tools(request.get("tools"))
        if messages[-1]["role"] == "assistant":
            raise BadRequest("messages: the last one is the assistant's; the policy answers from its beginning")
        if request.get("tool_choice") not in (None, "auto", "none"):
            raise BadRequest("tool_choice: auto or none; what is forced on the policy is no sample of it")
        stop = _stop_texts(request)
        async with self._turns:
            place, response, times = await self._turn(lambda: self.episode.place_chat(messages, tools), request, stop)
            chat = self.episode.chat
            text = _before_stop(chat.text_of(response.tokens, tools is not None), response, stop)
            message: Message = {"role": "assistant", "content": text}
            if tools and request.get("tool_choice") != "none":
                end = chat.thoughts_end(place.ids, text)  # calls within thoughts are not executed
                try:
                    said, calls = await self.parse_tools(text[end:], tools)
                except BadRequest as error:  # the answer was sampled, and the agent does not get it
                    self.failure = self.failure or str(error)
                    raise
                if calls:
                    message = {"role": "assistant", "content": text[:end] + said or None, "tool_calls": calls}
            self.episode.record(place, response, [*messages, *normalised([message])], times)
            if tools is None:
                self.texts.append(_before_stop(chat.scored_text_of(response.tokens), response, stop))
            else:
                self.texts.append(message["content"] or "")
        finish = "tool_calls" if "tool_calls" in message else response.finish_reason
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return _completion("chat.completion", request, choice, place, response)

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A completion of a text or of token ids, with the ids of the answer as `token_ids`. Raises BadRequest."""
        self._check(request)
        tokens = self._tokens(request.get("prompt"))
        stop = _stop_texts(request)
        async with self._turns:
            place, response, times = await self._turn(lambda: self.episode.place_tokens(tokens), request, stop)
            chat = self.episode.chat
            text = _before_stop(chat.text_of(response.tokens, False), response, stop)
            self.episode.record(place, response, None, times)
            self.texts.append(_before_stop(chat.scored_text_of(response.tokens), response, stop))
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": response.finish_reason}
        return _completion("text_completion", request, choice | {"token_ids": response.tokens}, place, response)

    @property
    def counts(self) -> dict[str, int]:
        """As EpisodeRecord's."""
        episode = self.episode
        limits = {f"limit_{name}": 1 for name in sorted(self.reached)}
        made = {"turns": len(episode.turns), "segments": len(episode.segments), **episode.reasons, **limits}
        abandoned = self._begun - len(episode.turns)  # the agent did not wait, or nothing came
        return made | ({"abandoned": abandoned} if abandoned else {})

    def _check(self, request: Mapping[str, Any]) -> None:
        for name in REFUSED:
            if request.get(name) not in (None, False, {}, [], {"type": "text"}):
                raise BadRequest(f"{name}: not supported, since every answer is a sample of the policy")
        if request.get("n") not in (None, 1):
            raise BadRequest("n: ask for each answer with a request of its own")
        others = ((name, value) for name, value in request.items() if name not in (*USED, *REFUSED))
        self.ignored.update(name for name, value in others if value or (name in MEANT_AT_ZERO and value is not None))

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return self.episode.chat.encode_text(prompt)
        if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
            raise BadRequest("prompt: give a string or a list of token ids")
        if min(prompt) < 0 or max(prompt) >= self.limits.vocab_size:
            raise BadRequest(f"prompt: a token id that is not in the vocabulary (0 to {self.limits.vocab_size - 1})")
        return prompt

    async def _turn(
        self, placed: Callable[[], Place], request: Mapping[str, Any], stop: tuple[str, ...]
    ) -> tuple[Place, Response, tuple[float, float]]:
        """With its times, as Turn's."""
        if stop and not self.limits.stops:
            raise BadRequest("stop: with rollout.at_sync partial a server does not detect it; set it to drain")
        asked = request.get("max_completion_tokens")
        asked = request.get("max_tokens") if asked is None else asked
        if asked is not None and (type(asked) is not int or asked < 1):
            raise BadRequest("max_tokens: a number of tokens, at least 1")
        place, left = self._place(placed)
        limit = min(left, key=lambda name: left[name])
        most = min(left[limit], asked or left[limit])
        number, self._begun = self._begun, self._begun + 1
        asked_at, ids = time.monotonic() - self.started, place.ids
        response = await self.sample(ids, most, stop, number, len(ids) - len(place.context))
        if response.error:
            self.failure = self.failure or response.error
            raise BadRequest(response.error)
        if response.finish_reason == "length" and len(response.tokens) == left[limit]:
            self.reached.add(limit)
        return place, response, (asked_at, time.monotonic() - self.started)

    def _place(self, placed: Callable[[], Place]) -> tuple[Place, dict[str, int]]:
        """Where the answer goes, and the tokens that each limit leaves it. Raises BadRequest."""
        limits, left = self.limits, self.limits.tokens - self.episode.sampled
        if self.ended or self.failure:
            raise BadRequest(self.failure or "the episode has ended")
        if self._begun >= limits.turns:
            self._limit("turns", f"rollout.agent_turns: the episode has had its {limits.turns} turns")
        if left <= 0:
            self._limit("tokens", f"rollout.max_new_tokens: the episode has its {limits.tokens} tokens")
        place = placed()
        context, size = len(place.ids), self.episode.size_before(place)
        if context >= limits.length:
            self._limit("context", f"the conversation has {context} tokens, of at most {limits.length}")
        if size >= limits.trained:
            self._limit("size", f"rollout.agent_tokens: the episode's segments have {size} of {limits.trained} tokens")
        return place, {"context": limits.length - context, "tokens": left, "size": limits.trained - size}

    def _limit(self, name: str, why: str) -> None:
        self.reached.add(name)
        raise LimitReached(why)


def _before_stop(text: str, response: Response, stop: tuple[str, ...]) -> str:
    """The text before the stop text that ended the response."""
    found = [text.index(s) for s in stop if s in text]
    return text[: min(found)] if found and response.finish_reason == "stop" else text


def _stop_texts(request: Mapping[str, Any]) -> tuple[str, ...]:
    stop = request.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest("stop: a text, or a list of texts")
    return tuple(stop)


def _completion(
    kind: str, request: Mapping[str, Any], choice: dict[str, Any], place: Place, response: Response
) -> dict[str, Any]:
    used = {"prompt_tokens": len(place.ids), "completion_tokens": len(response.tokens)}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(request.get("model") or "policy"),
        "choices": [choice],
        "usage": {**used, "total_tokens": sum(used.values())},
    }


def tool_calls(parsed: Mapping[str, Any]) -> tuple[str, list[Message]]:
    """SGLang's parsed answer as text and tool calls in OpenAI's form."""
    calls = [
        {
            "id": uuid.uuid4().hex[:9],  # Mistral's templates need exactly 9 characters
            "type": "function",
            "function": {"name": call["name"], "arguments": call["parameters"] or "{}"},
        }
        for call in parsed["calls"]
    ]
    return parsed["normal_text"] or "", calls


def events(completion: Mapping[str, Any], with_usage: bool) -> list[dict[str, Any]]:
    """A finished completion as the events of a stream: an answer is in as few of them as its parts."""
    (choice,) = completion["choices"]
    head = {name: completion[name] for name in ("id", "created", "model")}
    head["object"] = completion["object"] + (".chunk" if "message" in choice else "")

    def event(finish: str | None = None, **parts: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "logprobs": None, "finish_reason": finish, **parts}]}

    finish = choice["finish_reason"]
    if "message" in choice:
        message = choice["message"]
        made = [event(delta={"role": "assistant", "content": message["content"]})]
        calls = enumerate(message.get("tool_calls", ()))
        made += [event(delta={"tool_calls": [{"index": i, **call}]}) for i, call in calls]
        made.append(event(finish, delta={}))
    else:
        made = [event(finish, text=choice["text"], token_ids=choice["token_ids"])]
    return [*made, *([{**head, "choices": [], "usage": completion["usage"]}] if with_usage else [])]
