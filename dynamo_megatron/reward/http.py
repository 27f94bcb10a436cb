"""The HTTP client of the rewards that services compute: `judge`, `reward_model`, and URLs in `reward.functions`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import regex
from jinja2 import TemplateError
from yarl import URL

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.data.templates import chat_messages, load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, NoScore, checked, checked_steps
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

REQUESTS = 8  # to one URL, under way at once
CONNECT_TIMEOUT = 5.0  # seconds
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a request is sent again, doubled each time
SHOWN = 200  # characters of an answer in a message
REPLY_SHOWN = 80  # characters of a reply in a message
LONGEST_ERROR = 200  # characters of the description of a wrong reward in a message
PLACES = re.compile(r"\{(prompt|response|answer)\}")
PATTERN_TIMEOUT = 0.5  # seconds: the user's pattern may take exponential time while other replies wait


@dataclass(frozen=True)
class Address:
    """`api_key` is sent as "Authorization: Bearer KEY"; with "" no such header is sent."""

    url: str
    api_key: str = field(default="", repr=False)


class HttpReward:
    """A reward function that a service computes: `sample`, `body` and `results` say what is sent and received.

    A request is sent again, after increasing pauses, if the connection fails or the answer is 429 or 5xx; any other
    answer is final. A request and its repeats have `config.deadline` seconds; waiting for a free request does not
    count. The last `config.cache` scores are kept. Samples may come from one event loop after the other.
    """

    path = ""  # is appended to the address
    batch = 1  # most samples of a request

    def __init__(
        self,
        name: str,
        addresses: Sequence[Address],
        config: RewardConfig,
        concurrency: int,
        per_second: float | None = None,
    ) -> None:
        """`concurrency`: requests under way at once. `per_second`: how many may be sent per second, repeats included;
        None: no limit."""
        self.name, self._addresses, self._deadline, self._cached = name, addresses, config.deadline, config.cache
        self._turns = itertools.cycle(addresses)
        self._concurrency, self._per_second = concurrency, per_second
        self._cache: dict[bytes, asyncio.Future[FunctionResult]] = {}  # the last used one last
        self._waiting: list[tuple[bytes, int, asyncio.Future[FunctionResult]]] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # the last one that samples came from
        self._opened: asyncio.Task[None] | None = None  # has the session of this loop
        self._next_turn = 0.0  # monotonic seconds

    def sample(self, prompt: Prompt, response: str) -> bytes:
        """Encodes one sample. Raises ValueError, TypeError or RecursionError if that is not possible."""
        raise NotImplementedError

    def body(self, samples: Sequence[bytes]) -> bytes:
        return samples[0]

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        """One result per sample; `characters`: their responses' lengths. Raises NoScore for a reply without scores."""
        raise NotImplementedError

    def start(self) -> None:
        """Raises ValueError (one line) for a malformed URL, and if no service accepts connections at the URL."""
        for address in self._addresses:
            try:
                url = URL(address.url)
                socket.create_connection((url.host, url.port), CONNECT_TIMEOUT).close()
            except (ValueError, OSError) as error:  # ValueError: an impossible port or host name
                what = f"reward.functions: {self.name}: {address.url}"
                raise InputError(f"{what}: cannot connect, is the service up? ({error})") from error

    async def score(self, prompt: Prompt, response: str) -> FunctionResult:
        """The result of one response: "timed_out" if no answer came within the deadline, "crashed" if an attempt failed
        before it passed."""
        try:
            sample = self.sample(prompt, response)
        except (ValueError, TypeError, RecursionError) as error:  # nesting, digits, keys that are not text
            return FunctionResult(self.name, "crashed", text=on_one_line(f"the problem cannot be sent: {error}", SHOWN))
        key, loop = hashlib.sha256(sample).digest(), asyncio.get_running_loop()
        if loop is not self._loop:
            self._enter(loop)
        result = self._cache.pop(key, None)
        if result is None:
            result = loop.create_future()
            result.add_done_callback(lambda done: self._cache.pop(key, None) if not _scored(done) else None)
            self._waiting.append((sample, len(response), result))
            loop.call_soon(self._begin)  # later, so that the samples of this moment share requests
        if self._cached:
            self._cache[key] = result
            if len(self._cache) > self._cached:
                del self._cache[next(iter(self._cache))]
        return await asyncio.shield(result)  # others may wait for it too

    def close(self) -> None:
        """Cancels the requests under way and the samples that wait. May be called from any thread, and twice."""
        waiting = [result for _, _, result in self._waiting]
        self._waiting.clear()
        with contextlib.suppress(RuntimeError):  # the loop has ended, and they with it
            for future in (*self._requests, *waiting, *([self._opened] if self._opened else [])):
                future.get_loop().call_soon_threadsafe(future.cancel)

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leaves the event loop that samples came from before."""
        self.close()
        self._cache = {key: result for key, result in self._cache.items() if _scored(result)}
        self._requests = set()
        self._loop, self._opened = loop, loop.create_task(self._open())

    async def _open(self) -> None:
        """Holds the session, which reuses connections, until `close` or the end of the loop."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as self._session:
            await asyncio.get_running_loop().create_future()

    def _begin(self) -> None:
        """Begins as many requests as may be under way."""
        while self._waiting and len(self._requests) < self._concurrency:
            batch, self._waiting = self._waiting[: self.batch], self._waiting[self.batch :]
            request = asyncio.get_running_loop().create_task(self._send(batch))
            self._requests.add(request)
            request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled():
            self._begin()

    async def _send(self, batch: list[tuple[bytes, int, asyncio.Future[FunctionResult]]]) -> None:
        samples, characters, futures = zip(*batch, strict=True)
        try:
            results = self.results(await self._reply(self.body(samples)), characters)
        except NoScore as failure:
            results = [FunctionResult(self.name, failure.state, text=str(failure))] * len(batch)
        except Exception as error:  # else the samples would wait for ever
            text = on_one_line(f"its answer cannot be read: {error_line(error)}", SHOWN)
            results = [FunctionResult(self.name, "crashed", text=text)] * len(batch)
        except asyncio.CancelledError:
            for future in futures:
                future.cancel()
            raise
        for future, result in zip(futures, results, strict=True):
            future.set_result(result)

    async def _reply(self, body: bytes) -> bytes:
        """The content of the service's answer with status 200. Raises NoScore if there is none."""
        failure, pause, left = "", FIRST_PAUSE, self._deadline
        while True:
            address = next(self._turns)
            headers = {"Content-Type": "application/json"}
            if address.api_key:
                headers["Authorization"] = f"Bearer {address.api_key}"
            await self._turn()
            begun = time.monotonic()
            try:
                # A followed redirect may become a GET, and would send the API key to another address.
                given = {"data": body, "headers": headers, "allow_redirects": False}
                async with asyncio.timeout(left), self._session.post(address.url + self.path, **given) as answer:
                    reply = await answer.read()
                if answer.status == 200:
                    return reply
                failure = f"answered {answer.status}: {on_one_line(reply.decode(errors='replace'), SHOWN)}"
                if answer.status != 429 and answer.status < 500:
                    raise NoScore(failure, "crashed")
                asked = answer.headers.get("Retry-After", "")
                pause = max(pause, float(asked) if asked.isdecimal() else 0.0)
            except aiohttp.ClientError as error:
                failure = on_one_line(error_line(error), SHOWN)
            except TimeoutError:
                within = f"within reward.deadline ({self._deadline:g} s)"
                if not failure:
                    raise NoScore(f"no answer {within}", "timed_out") from None
                raise NoScore(f"no rewards {within}, the last attempt: {failure}", "crashed") from None
            await asyncio.sleep(min(pause, max(left, 0.0)))
            left -= time.monotonic() - begun
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _turn(self) -> None:
        """Waits so that no more than `per_second` requests begin in a second."""
        if self._per_second is not None:
            now = time.monotonic()
            turn = max(now, self._next_turn)
            self._next_turn = turn + 1 / self._per_second
            await asyncio.sleep(turn - now)


# What each service is sent, and how its replies become scores


class UrlService(HttpReward):
    """A service of the user's at `url`."""

    batch = 64

    def __init__(self, url: str, config: RewardConfig) -> None:
        key = key_of(config.api_key_env, "reward.api_key_env")
        super().__init__(url, [Address(url, key)], config, REQUESTS)

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


class Judge(HttpReward):
    """The chat completions of an OpenAI-compatible endpoint."""

    path = "/chat/completions"

    def __init__(self, config: RewardConfig) -> None:
        judge = config.judge
        address = Address(judge.url.rstrip("/"), key_of(judge.api_key_env, "reward.judge.api_key_env"))
        super().__init__("judge", [address], config, judge.concurrency, judge.requests_per_second)
        self._config, self._pattern = judge, regex.compile(judge.pattern)

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
        end = on_one_line(text[-REPLY_SHOWN:])
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
            raise NoScore(f"the judge's score {number!r:.{REPLY_SHOWN}} is not a number") from None
        low, high = self._config.range
        if not low <= value <= high:
            raise NoScore(f"the judge's score {value:g} is not in reward.judge.range ({low:g} to {high:g})")
        return (value - low) / (high - low)


class RewardModel(HttpReward):
    """SGLang's /classify: takes token ids, returns a sequence classifier's one output."""

    path = "/classify"

    def __init__(self, config: RewardConfig) -> None:
        """Raises ValueError (one line) if the folder has no tokenizer, or the tokenizer has no chat template."""
        model = config.reward_model
        key = key_of(model.api_key_env, "reward.reward_model.api_key_env")
        addresses = [Address(url.rstrip("/"), key) for url in model.urls]
        limits = (model.concurrency, model.requests_per_second)
        super().__init__("reward_model", addresses, config, *limits)
        self._range, self._tokenizer = model.range, load_tokenizer(model.path, key="reward.reward_model.path")
        if self._tokenizer.chat_template is None:
            raise InputError(f"reward.reward_model.path: the tokenizer of {model.path} has no chat template")

    def sample(self, prompt: Prompt, response: str) -> bytes:
        messages = chat_messages(prompt, None)
        try:
            encoded = self._tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=True, return_dict=True
            )
        except (TemplateError, KeyError) as error:
            raise InputError(f"the reward model's chat template fails on it: {error_line(error)}") from error
        return json.dumps({"input_ids": [list(encoded["input_ids"])]}).encode()

    def results(self, reply: bytes, characters: Sequence[int]) -> list[FunctionResult]:
        value = classifier_output(_parsed(reply))
        if self._range is not None:
            low, high = self._range
            value = (min(max(value, low), high) - low) / (high - low)
        return [FunctionResult(self.name, "scored", value)]


def _scored(result: asyncio.Future[FunctionResult]) -> bool:
    return result.done() and not result.cancelled() and result.result().state == "scored"


def key_of(variable: str | None, key: str) -> str:
    """The value of the environment variable `variable`, which the configuration's `key` names; "" where `variable` is
    None. Raises InputError where it is not set, or has a control character."""
    secret = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and (not secret or not secret.isprintable()):  # mostly a line break at the end
        raise InputError(f"{key}: the environment variable {variable} is not set, or has a line break")
    return secret


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
    return f"{reply.decode(errors='replace')!r:.{REPLY_SHOWN}}"
