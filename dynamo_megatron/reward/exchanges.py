"""The requests to reward services, and how their replies, which are not trusted, are parsed into scores.

The samples of a request are encoded one by one, so that a sample that cannot be sent does not affect the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

import regex
from jinja2 import TemplateError

from dynamo_megatron.config.reward import JudgeConfig, RewardModelConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import checked, checked_steps
from dynamo_megatron.reward.outcomes import NoScore, Outcome
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

SHOWN = 80  # characters of a reply in a message
LONGEST_ERROR = 200  # characters of the description of a wrong reward in a message
PLACES = re.compile(r"\{(prompt|response|answer)\}")
READ = 20_000  # characters at the end of a judge's reply that are searched for its number
PATTERN_TIMEOUT = 0.5  # seconds for this search: the user's pattern may take exponential time while other replies wait


class Exchange(Protocol):
    """One kind of service. `name` is its name in `reward.functions`, `path` is appended to the address, and `batch` is
    the largest number of samples in a request. `splits`: if the service refuses a request of several samples (400), its
    halves are sent separately, since one sample may be the reason."""

    name: str
    path: str
    batch: int
    splits: bool

    def sample(self, prompt: Prompt, response: str) -> bytes:
        """Encodes one sample. Raises ValueError, TypeError or RecursionError where that is not possible."""

    def body(self, samples: Sequence[bytes]) -> bytes: ...

    def outcomes(self, reply: bytes, characters: Sequence[int]) -> list[Outcome]:
        """One outcome per sample; `characters`: their responses' lengths. Raises NoScore for a reply without scores."""


class OwnService:
    """A service of the user's at `url`, with the contract in `http.py`."""

    path, splits = "", False

    def __init__(self, url: str, batch: int) -> None:
        self.name, self.batch = url, batch

    def sample(self, prompt: Prompt, response: str) -> bytes:
        fields = {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text if prompt.messages is None else prompt.messages,
            "response": response,
            "answer": prompt.answer,
            "source": prompt.source,
            "meta": prompt.meta,
        }
        text = json.dumps(fields, default=str)
        # NaN and Infinity can occur in Parquet columns but not in JSON; they are sent as null.
        return json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()

    def body(self, samples: Sequence[bytes]) -> bytes:
        return b'{"samples": [' + b", ".join(samples) + b"]}"

    def outcomes(self, reply: bytes, characters: Sequence[int]) -> list[Outcome]:
        try:
            rewards = json.loads(reply)["rewards"]
        except (ValueError, TypeError, LookupError, RecursionError):
            rewards = None
        if not isinstance(rewards, list):
            raise NoScore(f'the answer is not {{"rewards": [...]}} but {reply.decode(errors="replace")!r:.{SHOWN}}')
        if len(rewards) != len(characters):
            raise NoScore(f"gave {len(rewards)} rewards for {len(characters)} samples")
        return [_outcome(self.name, *given) for given in zip(rewards, characters, strict=True)]


class Judge:
    """The chat completions of an OpenAI-compatible endpoint, one sample per request."""

    name, path, batch, splits = "judge", "/chat/completions", 1, False

    def __init__(self, config: JudgeConfig) -> None:
        self._config, self._pattern = config, regex.compile(config.pattern)

    def sample(self, prompt: Prompt, response: str) -> bytes:
        texts = {"prompt": problem(prompt), "response": response, "answer": _text(prompt.answer)}
        # In one pass: the text "{answer}" in a response must not be replaced by the answer.
        asked = PLACES.sub(lambda place: texts[place[1]], self._config.template)
        messages = [{"role": "user", "content": asked}]
        return json.dumps({**self._config.request, "model": self._config.model, "messages": messages}).encode()

    def body(self, samples: Sequence[bytes]) -> bytes:
        (sample,) = samples
        return sample

    def outcomes(self, reply: bytes, characters: Sequence[int]) -> list[Outcome]:
        said = _parsed(reply)
        try:
            choice = said["choices"][0]
            text = choice["message"]["content"]
        except (TypeError, LookupError):
            text = None
        if not isinstance(text, str):
            shown = reply.decode(errors="replace")
            raise NoScore(f"the answer is no chat completion with a text but {shown!r:.{SHOWN}}")
        return [Outcome(self.name, "scored", self._score(text, choice.get("finish_reason") == "length"))]

    def _score(self, text: str, cut_off: bool) -> float:
        """The pattern's last match as a score in [0, 1]. Raises NoScore where nothing matches, where the number is not
        in the range, and where the text was cut off right after the number, which may then lack digits."""
        text = text[-READ:]
        try:
            matches = list(self._pattern.finditer(text, timeout=PATTERN_TIMEOUT))
        except TimeoutError:
            raise NoScore(f"reward.judge.pattern took more than {PATTERN_TIMEOUT:g} s on the judge's reply") from None
        end, groups = on_one_line(text[-SHOWN:]), [match[1] for match in matches]
        if not groups or groups[-1] is None:
            raise NoScore(f"nothing in the judge's reply matches reward.judge.pattern; it ends with {end!r}")
        if cut_off and not text[matches[-1].end(1) :].strip(".eE+-"):
            raise NoScore(
                f"the judge's reply was cut off in its number, {end!r}; raise max_tokens in reward.judge.request"
            )
        try:
            value = checked(float(groups[-1].replace("\N{MINUS SIGN}", "-")))
        except ValueError:
            raise NoScore(f"the judge's score {groups[-1]!r:.{SHOWN}} is not a number") from None
        low, high = self._config.range
        if not low <= value <= high:
            raise NoScore(f"the judge's score {value:g} is not in reward.judge.range ({low:g} to {high:g})")
        return (value - low) / (high - low)


class RewardModel:
    """SGLang's /classify: takes token ids, returns the output of a sequence classifier with one label."""

    name, path, splits = "reward_model", "/classify", True

    def __init__(self, config: RewardModelConfig, batch: int) -> None:
        """Raises ValueError (one line) where the folder has no tokenizer, or the tokenizer has no chat template."""
        self._config, self.batch = config, batch
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
        return json.dumps(list(encoded["input_ids"])).encode()

    def body(self, samples: Sequence[bytes]) -> bytes:
        return b'{"input_ids": [' + b", ".join(samples) + b"]}"

    def outcomes(self, reply: bytes, characters: Sequence[int]) -> list[Outcome]:
        scores = classified(_parsed(reply), len(characters))
        return [Outcome(self.name, "scored", self._scaled(score)) for score in scores]

    def _scaled(self, value: float) -> float:
        if self._config.range is None:
            return value
        low, high = self._config.range
        return (min(max(value, low), high) - low) / (high - low)


def classified(reply: Any, count: int) -> list[float]:
    """The scores in a reply of /classify to a list of `count` inputs. Raises NoScore for any other reply."""
    if not isinstance(reply, list) or len(reply) != count:
        raise NoScore(f"the answer is not a list of {count} but {on_one_line(repr(reply), SHOWN)}")
    scores = []
    for entry in reply:
        said = entry.get("embedding") if isinstance(entry, dict) else None
        said = said if isinstance(said, list) else [said]  # from an encoder a number, from a decoder a list of one
        if len(said) != 1:
            raise NoScore(f"gave {len(said)} numbers for a response; a reward model is a classifier with num_labels 1")
        if type(said[0]) not in (int, float):
            raise NoScore(f"gave {on_one_line(repr(said[0]), SHOWN)} in the place of a score")
        try:
            scores.append(checked(said[0]))
        except (ValueError, OverflowError) as error:
            raise NoScore(str(error)) from None
    return scores


def problem(prompt: Prompt) -> str:
    """The problem as one text; in a conversation the role stands before each message."""
    if prompt.messages is None or len(prompt.messages) == 1:
        return _text(prompt.text if prompt.messages is None else prompt.messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _parsed(reply: bytes) -> Any:
    """The reply's JSON value. Raises NoScore where the reply is not JSON."""
    try:
        return plain_json.parse(reply, "the answer")
    except ValueError as error:
        raise NoScore(str(error)) from None


def _outcome(function: str, value: Any, characters: int) -> Outcome:
    try:
        return Outcome(function, "scored", *checked_steps(value, characters))
    except (ValueError, OverflowError) as error:
        return Outcome(function, "wrong_format", text=on_one_line(str(error), LONGEST_ERROR))
