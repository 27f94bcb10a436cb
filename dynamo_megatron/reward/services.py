"""What each service is sent, and how its replies become scores (docs/rewards.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import regex
from jinja2 import TemplateError

from dynamo_megatron.config.reward import JudgeConfig, RewardModelConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, NoScore, checked, checked_steps
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

SHOWN = 80  # characters of a reply in a message
LONGEST_ERROR = 200  # characters of the description of a wrong reward in a message
PLACES = re.compile(r"\{(prompt|response|answer)\}")
PATTERN_TIMEOUT = 0.5  # seconds: the user's pattern may take exponential time while other replies wait


class Service:
    """One kind of service: its name in `reward.functions`, and one sample per request unless it says otherwise."""

    name = ""
    path = ""  # is appended to the address
    batch = 1  # most samples of a request

    def sample(self, prompt: Prompt, response: str) -> bytes:
        """Encodes one sample. Raises ValueError, TypeError or RecursionError if that is not possible."""
        raise NotImplementedError

    def body(self, samples: Sequence[bytes]) -> bytes:
        return samples[0]

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        """One result per sample; `characters`: their responses' lengths. Raises NoScore for a reply without scores."""
        raise NotImplementedError


class UrlService(Service):
    """A service of the user's at `url`."""

    batch = 64

    def __init__(self, url: str) -> None:
        self.name = url

    def sample(self, prompt: Prompt, response: str) -> bytes:
        fields = {name: getattr(prompt, name) for name in ("prompt_id", "answer", "source", "meta")}
        fields |= {"prompt": prompt.text if prompt.messages is None else prompt.messages, "response": response}
        text = json.dumps(fields, default=str)
        # NaN and Infinity can occur in Parquet columns but not in JSON; they are sent as null.
        return json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()

    def body(self, samples: Sequence[bytes]) -> bytes:
        return b'{"samples": [' + b", ".join(samples) + b"]}"

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        parsed = _parsed(reply)
        rewards = parsed.get("rewards") if isinstance(parsed, dict) else None
        if not isinstance(rewards, list):
            raise NoScore(f'the answer is not {{"rewards": [...]}} but {_start(reply)}')
        if len(rewards) != len(characters):
            raise NoScore(f"gave {len(rewards)} rewards for {len(characters)} samples")
        results = []
        for value, length in zip(rewards, characters, strict=True):
            try:
                results.append(FunctionResult(self.name, "scored", *checked_steps(value, length)))
            except (ValueError, OverflowError) as error:
                text = on_one_line(str(error), LONGEST_ERROR)
                results.append(FunctionResult(self.name, "wrong_format", text=text))
        return results


class Judge(Service):
    """The chat completions of an OpenAI-compatible endpoint."""

    name, path = "judge", "/chat/completions"

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._pattern = config, regex.compile(config.pattern)

    def sample(self, prompt: Prompt, response: str) -> bytes:
        answer = "" if prompt.answer is None else str(prompt.answer)
        texts = {"prompt": _problem(prompt), "response": response, "answer": answer}
        # In one pass: the text "{answer}" in a response must not be replaced by the answer.
        asked = PLACES.sub(lambda place: texts[place[1]], self._config.template)
        messages = [{"role": "user", "content": asked}]
        return json.dumps({**self._config.request, "model": self._config.model, "messages": messages}).encode()

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        try:
            choice = _parsed(reply)["choices"][0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            text = None
        if not isinstance(text, str):
            raise NoScore(f"the answer is no chat completion with a text but {_start(reply)}")
        return [FunctionResult(self.name, "scored", self._score(text, choice.get("finish_reason") == "length"))]

    def _score(self, text: str, cut_off: bool) -> float:
        """The pattern's last match as a score in [0, 1]. Raises NoScore if nothing matches, if the number is not in the
        range, and if the text was cut off right after the number, which may then lack digits."""
        try:
            matches = list(self._pattern.finditer(text, timeout=PATTERN_TIMEOUT))
        except TimeoutError:
            raise NoScore(f"reward.judge.pattern took more than {PATTERN_TIMEOUT:g} s on the judge's reply") from None
        end = on_one_line(text[-SHOWN:])
        if not matches or matches[-1][1] is None:
            raise NoScore(f"nothing in the judge's reply matches reward.judge.pattern; it ends with {end!r}")
        number = matches[-1][1]
        if cut_off and not text[matches[-1].end(1) :].strip(".eE+-"):
            raise NoScore(
                f"the judge's reply was cut off in its number, {end!r}; raise reward.judge.request.max_tokens"
            )
        try:
            value = checked(float(number.replace("\N{MINUS SIGN}", "-")))
        except ValueError:
            raise NoScore(f"the judge's score {number!r:.{SHOWN}} is not a number") from None
        low, high = self._config.range
        if not low <= value <= high:
            raise NoScore(f"the judge's score {value:g} is not in reward.judge.range ({low:g} to {high:g})")
        return (value - low) / (high - low)


class RewardModel(Service):
    """SGLang's /classify: takes token ids, returns a sequence classifier's one output."""

    name, path = "reward_model", "/classify"

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises ValueError (one line) if the folder has no tokenizer, or the tokenizer has no chat template."""
        self._config = config
        self._tokenizer = load_tokenizer(config.path, key="reward.reward_model.path")
        if self._tokenizer.chat_template is None:
            raise InputError(f"reward.reward_model.path: the tokenizer of {config.path} has no chat template")

    def sample(self, prompt: Prompt, response: str) -> bytes:
        messages = prompt.messages if prompt.messages is not None else [{"role": "user", "content": prompt.text}]
        try:
            encoded = self._tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=True, return_dict=True
            )
        except (TemplateError, KeyError) as error:
            raise InputError(f"the reward model's chat template fails on it: {error_line(error)}") from error
        return json.dumps({"input_ids": [list(encoded["input_ids"])]}).encode()

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        value = classifier_output(_parsed(reply))
        if self._config.range is not None:
            low, high = self._config.range
            value = (min(max(value, low), high) - low) / (high - low)
        return [FunctionResult(self.name, "scored", value)]


def classifier_output(reply: Any) -> float:
    """The score in a reply of /classify to a list of one input. Raises NoScore for any other reply."""
    found = reply[0].get("embedding") if isinstance(reply, list) and reply and isinstance(reply[0], dict) else None
    found = found if isinstance(found, list) else [found]  # from an encoder a number, from a decoder a list of one
    if len(found) != 1:
        raise NoScore(f"gave {len(found)} numbers for a response; a reward model is a classifier with num_labels 1")
    try:
        return checked(found[0])
    except (ValueError, OverflowError) as error:
        raise NoScore(str(error)) from None


def _problem(prompt: Prompt) -> str:
    """The problem as one text; in a conversation the role stands before each message."""
    if prompt.messages is None or len(prompt.messages) == 1:
        return str(prompt.text if prompt.messages is None else prompt.messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _parsed(reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except ValueError:
        raise NoScore(f"the answer is not JSON but {_start(reply)}") from None


def _start(reply: bytes) -> str:
    return f"{reply.decode(errors='replace')!r:.{SHOWN}}"
