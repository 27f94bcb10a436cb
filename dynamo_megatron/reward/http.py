"""Reward functions behind HTTP: an entry of `reward.functions` that is a URL.

The contract: the service gets a POST with JSON

    {"samples": [{"prompt_id": text, "prompt": text or list of messages, "response": text,
                  "answer": ..., "source": text, "meta": {...}}, ...]}

with at most 64 samples (what JSON does not know, such as a date, goes as its text) and answers 200 with

    {"rewards": [number, ...]}

as many finite numbers, in the same order, uncompressed; in place of a number also {"reward": number, "steps":
[[start, end, number], ...]} (`functions.py`). An answer has at most 1 MiB and 64 bytes for each character of the
request's responses. Several requests may be under way at once. A request is sent again, later and later, where the
connection fails or the answer is 429 or 5xx; any other answer is final. Whatever a service answers becomes an outcome
of the samples that were asked for, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp
from yarl import URL

from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import checked_steps
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line, on_one_line, show_exception
from dynamo_megatron.types import Prompt

BATCH = 64  # samples a request
REQUESTS = 8  # under way at once
GATHERING = 0.02  # seconds that a sample waits for others to share its request
CONNECT_TIMEOUT = 5.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a request is sent again, doubled each time
LARGEST_ANSWER = 1 << 20  # bytes: 64 rewards take 2 KB, and a service may add its reasons
LARGEST_STEP = 64  # bytes more for each character of the responses: every one may be a step
SHOWN = 200  # characters of an answer in a message


class HttpReward:
    """The reward function at `url`; a request has `deadline` seconds from when it is first sent, its repeats included.

    Time that a sample waits for one of the requests under way to end does not count. Owns a thread with an event loop
    of its own, so that samples may come from any event loop and thread, and share requests.
    """

    def __init__(self, url: str, deadline: float, api_key: str = "") -> None:
        """`api_key`: sent as "Authorization: Bearer KEY"; "": none."""
        self._name = url
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._deadline = deadline
        self._lock = threading.Lock()
        self._closed = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reward {url}", daemon=True)

    def start(self) -> None:
        """Raises ValueError (one line) for a malformed URL, and where nothing takes connections there."""
        try:
            self._url = URL(self._name)
            if not self._url.host:
                raise InputError("it names no host")
            socket.create_connection((self._url.host, self._url.port), CONNECT_TIMEOUT).close()
        except ValueError as error:  # a host that cannot be one is an UnicodeError of the look-up
            raise InputError(f"reward.functions: {self._name}: not a URL: {error}") from None
        except OSError as error:
            raise InputError(f"reward.functions: {self._name}: cannot connect, is the service up? ({error})") from error
        self._thread.start()
        if not self._ready.wait(CONNECT_TIMEOUT):
            raise RuntimeError(f"reward.functions: {self._name}: its thread did not start in {CONNECT_TIMEOUT:g} s")

    async def score(self, prompt: Prompt, response: str) -> tuple:
        """("parts", {url: reward}, *steps), ("error", url, text), or ("timeout", url, text) where no answer came within
        the deadline.

        A deadline that passes after an attempt has failed is an error: the service is down, not slow.
        Raises RuntimeError after `close`.
        """
        sample = {
            "prompt_id": prompt.prompt_id,
            "prompt": prompt.text if prompt.messages is None else prompt.messages,
            "response": response,
            "answer": prompt.answer,
            "source": prompt.source,
            "meta": prompt.meta,
        }
        try:
            text = json.dumps(sample, default=str)
            # NaN and Infinity, which Parquet columns have and JSON has not, go as null.
            encoded = json.dumps(json.loads(text, parse_constant=lambda _: None)).encode()
        except (ValueError, TypeError, RecursionError) as error:  # nested too deep, too many digits, keys of no text
            return ("error", self._name, on_one_line(f"the problem cannot be sent as JSON: {error}", SHOWN))
        with self._lock:  # what comes after `close` would wait for ever
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            outcome = asyncio.run_coroutine_threadsafe(self._outcome(encoded, len(response)), self._loop)
        kind, *rest = await asyncio.wrap_future(outcome)
        return self._checked(rest[0], len(response)) if kind == "value" else (kind, *rest)

    def close(self) -> None:
        """Ends the requests under way, the session and the thread; what waits is cancelled. May be called twice."""
        with self._lock:
            if not self._closed and self._ready.is_set():
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._closed = True
        if self._ready.is_set():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _outcome(self, sample: bytes, characters: int) -> tuple:
        outcome = self._loop.create_future()
        self._waiting.put_nowait((sample, characters, outcome))
        return await outcome

    async def _serve(self) -> None:
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        self._waiting: asyncio.Queue[tuple[bytes, int, asyncio.Future]] = asyncio.Queue()
        free = asyncio.Semaphore(REQUESTS)
        # No connection is kept: one that the service closed while idle would look like a failure.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT, self._deadline / 2))
        async with (
            # An answer is read as it comes: a compressed one could become any size.
            aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session,
            asyncio.TaskGroup() as requests,
        ):
            self._ready.set()
            while True:
                await free.acquire()
                batch = [await self._waiting.get()]
                await asyncio.sleep(GATHERING)
                while len(batch) < BATCH and not self._waiting.empty():
                    batch.append(self._waiting.get_nowait())
                requests.create_task(self._request(batch)).add_done_callback(lambda _: free.release())

    async def _request(self, batch: Sequence[tuple[bytes, int, asyncio.Future]]) -> None:
        body = b'{"samples": [' + b", ".join(sample for sample, _, _ in batch) + b"]}"
        largest = LARGEST_ANSWER + LARGEST_STEP * sum(characters for _, characters, _ in batch)
        for (_, _, outcome), result in zip(batch, await self._answer(body, len(batch), largest), strict=True):
            if not outcome.done():  # its caller may have been cancelled
                outcome.set_result(result)

    async def _answer(self, body: bytes, count: int, largest: int) -> list[tuple]:
        """An outcome for each of `count` samples, whatever the service answers: ("value", ...) or a failure. More than
        `largest` bytes are one."""
        failure, pause = None, FIRST_PAUSE
        try:
            async with asyncio.timeout(self._deadline):
                while True:
                    try:
                        status, reply = await self._post(body, largest)
                        if status == 200:
                            return self._rewards(reply, count)
                        failure = f"answered {status}: {on_one_line(reply.decode(errors='replace'), SHOWN)}"
                        if status != 429 and status < 500:
                            break
                    except aiohttp.ClientError as error:
                        failure = error_line(error, SHOWN)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        except TimeoutError:
            if failure is None:
                text = f"no answer within reward.deadline ({self._deadline:g} s)"
                return [("timeout", self._name, text)] * count
            failure = f"no rewards within reward.deadline ({self._deadline:g} s), the last attempt: {failure}"
        except _Unreadable as error:
            failure = str(error)
        except Exception as error:  # here it would end the thread that the samples of every request wait for
            show_exception(type(error), error, error.__traceback__)  # it may be a fault of ours
            failure = on_one_line(f"its answer cannot be read: {type(error).__name__}: {error}", SHOWN)
        return [("error", self._name, failure)] * count

    async def _post(self, body: bytes, largest: int) -> tuple[int, bytes]:
        # A followed redirect may become a GET, and would take the key elsewhere.
        async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as reply:
            if (encoding := reply.headers.get("Content-Encoding", "identity")) != "identity":
                raise _Unreadable(f"answered with Content-Encoding {on_one_line(encoding, 40)}; asked for identity")
            answer = bytearray()
            async for part in reply.content.iter_any():
                answer += part
                if len(answer) > largest:
                    raise _Unreadable(f"answered {reply.status} with more than {largest} bytes")
            return reply.status, bytes(answer)

    def _rewards(self, reply: bytes, count: int) -> list[tuple]:
        try:
            rewards = json.loads(reply, object_pairs_hook=plain_json.unique_keys)["rewards"]
        except (ValueError, TypeError, LookupError, RecursionError):
            rewards = None
        if not isinstance(rewards, list):
            raise _Unreadable(f'the answer is not {{"rewards": [...]}} but {reply.decode(errors="replace")!r:.80}')
        if len(rewards) != count:
            raise _Unreadable(f"gave {len(rewards)} rewards for {count} samples")
        return [("value", reward) for reward in rewards]

    def _checked(self, value: Any, characters: int) -> tuple:
        try:
            reward, steps = checked_steps(value, characters)
            return ("parts", {self._name: reward}, *steps)
        except (ValueError, OverflowError) as error:
            return ("error", self._name, on_one_line(str(error), SHOWN))


class _Unreadable(Exception):
    """An answer that holds no rewards; the message says why, in one line."""
