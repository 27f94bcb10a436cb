"""The HTTP client of the rewards that services compute: `judge`, `reward_model`, and URLs in `reward.functions`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
from jinja2 import TemplateError
from yarl import URL

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.data.templates import DATE, chat_messages, load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, NoScore, checked, checked_steps
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

REQUESTS = 64  # to one URL, under way at once
CONNECT_TIMEOUT = 5.0  # seconds
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a request is sent again, doubled each time
SHOWN = 200  # characters of an answer, or of what is wrong with it, in a message
REPLY_SHOWN = 80  # characters of a reply in a message
PLACES = re.compile(r"\{(prompt|response|answer)\}")


class HttpReward:
    """A reward function that a service computes: `body` and `result` say what is sent and received.

    A request is sent again, after increasing pauses, at least those of Retry-After, if the connection fails or the
    answer is 429 or 5xx; any other answer is final. A request and its repeats have `config.deadline` seconds; waiting
    for a free request does not count. Samples may come from one event loop after the other.
    """

    path = ""  # is appended to the address

    def __init__(self, name: str, urls: Sequence[str], key: str, config: RewardConfig, concurrency: int) -> None:
        """`urls` get requests in turn, `concurrency` of them under way at once. `key` is sent as "Authorization: Bearer
        KEY"; with "" no such header is sent."""
        self.name, self._urls, self._deadline = name, urls, config.deadline
        self._turns, self._concurrency = itertools.cycle(urls), concurrency
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._open: asyncio.Task[None] | None = None  # holds the session of the last event loop that samples came from

    def body(self, prompt: Prompt, response: str) -> bytes:
        """Encodes one sample. Raises ValueError, TypeError or RecursionError if that is not possible."""
        raise NotImplementedError

    def result(self, reply: bytes, characters: int) -> FunctionResult:
        """`characters`: the response's length. Raises NoScore for a reply without a score."""
        raise NotImplementedError

    def start(self) -> None:
        """Raises ValueError (one line) for a malformed URL, and if no service accepts connections at the URL."""
        for text in self._urls:
            try:
                url = URL(text)
                socket.create_connection((url.host, url.port), CONNECT_TIMEOUT).close()
            except (ValueError, OSError) as error:  # ValueError: an impossible port or host name
                what = f"reward.functions: {self.name}: {text}"
                raise InputError(f"{what}: cannot connect, is the service up? ({error})") from error

    async def score(self, prompt: Prompt, response: str) -> FunctionResult:
        """The result of one response: "timed_out" if no answer came within the deadline, "crashed" if an attempt failed
        before it passed."""
        try:
            body = self.body(prompt, response)
        except (ValueError, TypeError, RecursionError) as error:  # nesting, digits, keys that are not text
            return FunctionResult(self.name, "crashed", text=on_one_line(f"the problem cannot be sent: {error}", SHOWN))
        loop = asyncio.get_running_loop()
        if self._open is None or self._open.get_loop() is not loop:
            self.close()
            # `_free` limits the connections; a load balancer's cookie would keep all requests at one server.
            connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, timeout=TIMEOUT)
            self._free, self._open = asyncio.Semaphore(self._concurrency), loop.create_task(_held(self._session))
        try:
            async with self._free:
                return self.result(await self._reply(body), len(response))
        except NoScore as failure:
            return FunctionResult(self.name, failure.state, text=str(failure))

    def close(self) -> None:
        """Closes the connections; samples under way are lost. May be called from any thread, and twice."""
        if self._open is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the session with it
                self._open.get_loop().call_soon_threadsafe(self._open.cancel)

    async def _reply(self, body: bytes) -> bytes:
        """The content of the service's answer with status 200. Raises NoScore if there is none."""
        failure, pause, end = "", FIRST_PAUSE, time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0:
            try:
                # A followed redirect may become a GET, and would send the API key to another address.
                given = {"data": body, "headers": self._headers, "allow_redirects": False}
                url = next(self._turns) + self.path
                async with asyncio.timeout(left), self._session.post(url, **given) as answer:
                    reply = await answer.read()
                if answer.status == 200:
                    return reply
                failure = f"answered {answer.status}: {on_one_line(reply.decode(errors='replace'), SHOWN)}"
                if answer.status != 429 and answer.status < 500:
                    raise NoScore(failure, "crashed")
                asked = answer.headers.get("Retry-After", "")  # seconds; a date is not honoured
                pause = max(pause, float(asked) if asked.isdecimal() else 0.0)
            except aiohttp.ClientError as error:
                failure = on_one_line(error_line(error), SHOWN)
            except TimeoutError:
                break
            await asyncio.sleep(min(pause, end - time.monotonic()))
            pause = min(2 * pause, LONGEST_PAUSE)
        within = f"within reward.deadline ({self._deadline:g} s)"
        if failure:
            raise NoScore(f"no rewards {within}, the last attempt: {failure}", "crashed")
        raise NoScore(f"no answer {within}", "timed_out")


async def _held(session: aiohttp.ClientSession) -> None:
    """Keeps `session` open until `HttpReward.close` or the end of the event loop."""
    async with session:
        await asyncio.get_running_loop().create_future()


# What each service is sent, and how its replies become scores


class UrlService(HttpReward):
    """A service of the user's at `url`. Requests and replies are lists, of one sample each."""

    def __init__(self, url: str, config: RewardConfig) -> None:
        key = key_of(config.api_key_env, "reward.api_key_env")
        super().__init__(url, [url], key, config, REQUESTS)

    def body(self, prompt: Prompt, response: str) -> bytes:
        fields = {name: getattr(prompt, name) for name in ("prompt_id", "answer", "source", "meta", "thinking")}
        fields |= {"prompt": prompt.text if prompt.messages is None else prompt.messages, "response": response}
        text = json.dumps({"samples": [fields]}, default=str)
        # NaN and Infinity can occur in Parquet columns but not in JSON; they are sent as null.
        return json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()

    def result(self, reply: bytes, characters: int) -> FunctionResult:
        match _parsed(reply):
            case {"rewards": [reward]}:
                try:
                    return FunctionResult(self.name, "scored", *checked_steps(reward, characters))
                except (ValueError, OverflowError) as error:
                    raise NoScore(on_one_line(str(error), SHOWN)) from None
        raise NoScore(f'the answer is not {{"rewards": [...]}} with a reward a sample but {_start(reply)}')


class Judge(HttpReward):
    """The chat completions of an OpenAI-compatible endpoint."""

    path = "/chat/completions"

    def __init__(self, config: RewardConfig) -> None:
        judge = config.judge
        key = key_of(judge.api_key_env, "reward.judge.api_key_env")
        super().__init__("judge", [judge.url.rstrip("/")], key, config, judge.concurrency)
        self._config, self._pattern = judge, re.compile(judge.pattern)

    def body(self, prompt: Prompt, response: str) -> bytes:
        answer = "" if prompt.answer is None else str(prompt.answer)
        texts = {"prompt": _problem(prompt), "response": prompt.thinking + response, "answer": answer}
        # In one pass: the text "{answer}" in a response must not be replaced by the answer.
        asked = PLACES.sub(lambda place: texts[place[1]], self._config.template)
        messages = [{"role": "user", "content": asked}]
        return json.dumps({**self._config.request, "model": self._config.model, "messages": messages}).encode()

    def result(self, reply: bytes, characters: int) -> FunctionResult:
        match _parsed(reply):
            case {"choices": [{"message": {"content": str(text)}} as choice, *_]}:
                return FunctionResult(self.name, "scored", self._score(text, choice.get("finish_reason") == "length"))
        raise NoScore(f"the judge's reply has no choices[0].message.content: {_start(reply)}")

    def _score(self, text: str, cut_off: bool) -> float:
        """The pattern's last match after the judge's thinking as a score in [0, 1]. Raises NoScore if nothing matches,
        if the number is not in the range, and if the text was cut off right after the number, which may then lack
        digits."""
        end = on_one_line(text[-REPLY_SHOWN:])
        if text.lstrip().startswith("<think>"):  # the judge's own; it may quote the response's anywhere
            text = text.partition("</think>")[2]
        matches = list(self._pattern.finditer(text))
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
        super().__init__("reward_model", [url.rstrip("/") for url in model.urls], key, config, model.concurrency)
        self._range, self._tokenizer = model.range, load_tokenizer(model.path, key="reward.reward_model.path")
        if self._tokenizer.chat_template is None:
            raise InputError(f"reward.reward_model.path: the tokenizer of {model.path} has no chat template")

    def body(self, prompt: Prompt, response: str) -> bytes:
        messages = chat_messages(prompt, None)
        try:
            answer = {"role": "assistant", "content": prompt.thinking + response}
            encoded = self._tokenizer.apply_chat_template(
                [*messages, answer], tokenize=True, return_dict=True, strftime_now=DATE.strftime
            )
        except (TemplateError, KeyError) as error:
            raise InputError(f"the reward model's chat template fails on it: {error_line(error)}") from error
        return json.dumps({"input_ids": [list(encoded["input_ids"])]}).encode()

    def result(self, reply: bytes, characters: int) -> FunctionResult:
        match _parsed(reply):
            case [{"embedding": found}, *_]:
                found = found if isinstance(found, list) else [found]  # an encoder's is a number, a decoder's a list
            case _:
                found = [None]
        if len(found) != 1:
            raise NoScore(f"gave {len(found)} numbers for a response; a reward model is a classifier with num_labels 1")
        try:
            value = checked(found[0])
        except (ValueError, OverflowError) as error:
            raise NoScore(str(error)) from None
        if self._range is not None:
            low, high = self._range
            value = (min(max(value, low), high) - low) / (high - low)
        return FunctionResult(self.name, "scored", value)


def key_of(variable: str | None, key: str) -> str:
    """The value of the environment variable `variable`, which the configuration's `key` names; "" where `variable` is
    None. Raises InputError where it is not set, or has a control character."""
    secret = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and (not secret or not secret.isprintable()):  # mostly a line break at the end
        raise InputError(f"{key}: the environment variable {variable} is not set, or has a line break")
    return secret


def _problem(prompt: Prompt) -> str:
    """The problem as one text; in a conversation the role stands before each message."""
    if prompt.messages is None or len(prompt.messages) == 1:
        return str(prompt.text if prompt.messages is None else prompt.messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt.messages)


def _parsed(reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        raise NoScore(f"the answer is not JSON but {_start(reply)}") from None


def _start(reply: bytes) -> str:
    return f"{reply.decode(errors='replace')!r:.{REPLY_SHOWN}}"
