"""Reward functions behind HTTP: `judge`, `reward_model`, and entries of `reward.functions` that are URLs.

The contract of a URL: the service gets a POST with JSON

    {"samples": [{"prompt_id": text, "prompt": text or list of messages, "response": text,
                  "answer": ..., "source": text, "meta": {...}}, ...]}

with at most 64 samples (a value that JSON does not know, such as a date, is sent as text) and answers 200 with

    {"rewards": [number, ...]}

one finite number per sample, in the same order, uncompressed. In place of a number the service may send {"reward":
number, "steps": [[start, end, number], ...]} (`functions.py`). An answer has at most 1 MiB plus 64 bytes per character
of the request's responses. Several requests may be under way at once. Where the connection fails or the answer is 429
or 5xx, the request is sent again, after increasing pauses; any other answer is final. An answer affects only the
outcomes of the samples in its request. `exchanges.py` has the requests to `judge` and `reward_model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
from yarl import URL

from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.addresses import POLL_EVERY, Address, Addresses
from dynamo_megatron.reward.exchanges import Exchange
from dynamo_megatron.reward.outcomes import NoScore, Outcome
from dynamo_megatron.reward.score_cache import ScoreCache
from dynamo_megatron.runtime.credentials import without
from dynamo_megatron.runtime.plain_text import error_line, on_one_line, show
from dynamo_megatron.runtime.time_budget import TimeBudget
from dynamo_megatron.types import Prompt

BATCH = 64  # samples per request
REQUESTS = 8  # to one URL, under way at once
GATHERING = 0.02  # seconds that a sample waits for others to share its request
CONNECT_TIMEOUT = 5.0  # seconds
START_TIMEOUT = 60.0  # seconds for this object's thread; a busy machine may hold it up
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a request is sent again, doubled each time
LOSSES, LOSSES_ALONE = 2, 3  # attempts in which the server may go away: for a request of several samples, of one sample
LARGEST_ANSWER = 1 << 20  # bytes: 64 rewards take 2 KB, and a service may add its reasons
LARGEST_STEP = 64  # more bytes for each character of the responses: each character may be a step
SHOWN = 200  # characters of an answer in a message
UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)  # nothing was sent


@dataclass(frozen=True)
class Limits:
    """`deadline`: seconds that a request may take. `requests`: how many may be under way at once. `per_second`: how
    many may be sent per second, repeats included; None: no limit. `cached`: how many scores are kept."""

    deadline: float
    requests: int
    per_second: float | None = None
    cached: int = 0


@dataclass(eq=False)
class _Waiting:
    """A sample whose outcome a caller of `score` awaits, since `since` (monotonic seconds)."""

    sample: bytes
    characters: int  # of its response
    outcome: asyncio.Future[Outcome]
    since: float


class _Refused(NoScore):
    """The same request would most likely fail again: it was refused (400), or servers went away while they had it."""


class _EndsServers(_Refused):
    pass


class _Gone(Exception):
    """A server that will be restarted has gone away. `unreached`: nothing was sent to it. The message is one line."""

    def __init__(self, text: str, unreached: bool) -> None:
        super().__init__(text)
        self.unreached = unreached


class HttpReward:
    """The reward function of an exchange. A request and its repeats have `limits.deadline` seconds in total.

    The deadline does not include the time that a sample waits for a free request, for its turn under
    `limits.per_second`, or for a server that is restarted, nor an attempt during which the server went away, nor a time
    during which this process was suspended. Requests whose server went away are repeated one at a time, so that a
    request that crashes servers does not count against the others. Where the addresses are fixed and no request was
    answered for a whole deadline, the samples that waited all that time get the outcome of the failed request.
    Otherwise a service that is down would cost a deadline for each of thousands of samples. This object has a thread
    with its own event loop, so that samples may come from any event loop and thread, and share requests.
    """

    def __init__(self, exchange: Exchange, addresses: Addresses, limits: Limits) -> None:
        self.name = exchange.name
        self._exchange, self._addresses, self._limits = exchange, addresses, limits
        self._cache = ScoreCache(limits.cached)
        self._lock = threading.Lock()
        self._closed = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reward {self.name}", daemon=True)
        self._next_turn = 0.0  # monotonic seconds
        self._answered_at = self._failed_at = float("-inf")  # monotonic seconds
        self._failure = NoScore("")  # the one at `_failed_at`

    def start(self) -> None:
        """Raises ValueError (one line) for a malformed URL, and where no service accepts connections at the URL."""
        for address in self._addresses.known:
            self._check(address.url)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT):
            raise RuntimeError(f"reward.functions: {self.name}: its thread did not start in {START_TIMEOUT:g} s")

    def _check(self, address: str) -> None:
        what = address if address == self.name else f"{self.name}: {address}"
        try:
            url = URL(address)
            if not url.host:
                raise InputError("it names no host")
            socket.create_connection((url.host, url.port), CONNECT_TIMEOUT).close()
        except ValueError as error:  # for an impossible host name the look-up raises UnicodeError
            raise InputError(f"reward.functions: {what}: not a URL: {error}") from None
        except OSError as error:
            raise InputError(f"reward.functions: {what}: cannot connect, is the service up? ({error})") from error

    async def score(self, prompt: Prompt, response: str) -> Outcome:
        """The outcome of one response. Its state is "timed_out" where no answer came within the deadline, and "crashed"
        where an attempt failed before the deadline passed: the service is down, not slow. After `close` raises
        RuntimeError."""
        try:
            sample = self._exchange.sample(prompt, response)
        except (ValueError, TypeError, RecursionError) as error:  # nesting, digits, keys that are not text
            return Outcome(self.name, "crashed", text=on_one_line(f"the problem cannot be sent: {error}", SHOWN))
        with self._lock:  # a sample that comes after `close` would wait for ever
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            waiting = asyncio.run_coroutine_threadsafe(self._outcome(sample, len(response)), self._loop)
        return await asyncio.wrap_future(waiting)

    def close(self) -> None:
        """Stops the requests under way and the thread, and cancels waiting samples. May be called twice."""
        with self._lock:
            if not self._closed and self._ready.is_set():
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._closed = True
        if self._ready.is_set():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _outcome(self, sample: bytes, characters: int) -> Outcome:
        """The cached outcome, else, if there is a cache, that of an equal sample under way, else a new one."""
        if (known := self._cache.get(sample)) is not None:
            return known
        if (outcome := self._under_way.get(sample)) is None:
            outcome = self._loop.create_future()
            self._waiting.put_nowait(_Waiting(sample, characters, outcome, time.monotonic()))
            if self._limits.cached:
                self._under_way[sample] = outcome
                outcome.add_done_callback(lambda done: self._keep(sample, done.result()))
        return await asyncio.shield(outcome)  # one caller's cancellation does not end the request of the others

    def _keep(self, sample: bytes, outcome: Outcome) -> None:
        del self._under_way[sample]
        if outcome.state == "scored":
            self._cache.put(sample, outcome)

    async def _serve(self) -> None:
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        self._waiting: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._under_way: dict[bytes, asyncio.Future[Outcome]] = {}  # by sample; empty without a cache
        self._alone = asyncio.Lock()
        free = asyncio.Semaphore(self._limits.requests)
        # Connections are not reused: one that the service closed while it was idle would look like a failure.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_TIMEOUT, self._limits.deadline / 2))
        async with (
            # No decompression: a compressed answer could expand to any size.
            # DummyCookieJar: other jars log the names of malformed cookies, which may contain the API key.
            aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            ) as self._session,
            asyncio.TaskGroup() as requests,
        ):
            self._ready.set()
            while True:
                await free.acquire()
                batch = [await self._waiting.get()]
                if self._exchange.batch > 1:
                    await asyncio.sleep(GATHERING)
                while len(batch) < self._exchange.batch and not self._waiting.empty():
                    batch.append(self._waiting.get_nowait())
                requests.create_task(self._request(batch)).add_done_callback(lambda _: free.release())

    async def _request(self, batch: Sequence[_Waiting]) -> None:
        """Gives every sample of the batch its outcome, whatever the service answers."""
        hopeless = [waiting for waiting in batch if self._hopeless(waiting.since)]
        asked = [waiting for waiting in batch if waiting not in hopeless]
        outcomes = self._failed(self._failure, len(hopeless))
        outcomes += await self._outcomes(asked) if asked else []
        for waiting, outcome in zip([*hopeless, *asked], outcomes, strict=True):
            if not waiting.outcome.done():  # its caller may have been cancelled
                waiting.outcome.set_result(outcome)

    def _hopeless(self, since: float) -> bool:
        """Returns True where a sample has waited since `since` for longer than the deadline, and since then a request
        has failed and none was answered."""
        waited = time.monotonic() - since > self._limits.deadline
        return self._addresses.fixed and waited and self._answered_at < since < self._failed_at

    async def _outcomes(self, batch: Sequence[_Waiting], suspect: bool = False) -> list[Outcome]:
        """`suspect`: servers went away while they had a request that contained this batch."""
        try:
            reply = await self._answer(batch, suspect)
            self._answered_at = time.monotonic()
            outcomes = self._exchange.outcomes(reply, [waiting.characters for waiting in batch])
            # Hidden once more: JSON's escapes may have disguised an API key in the raw reply.
            return [dataclasses.replace(outcome, text=self._hidden(outcome.text)) for outcome in outcomes]
        except _Refused as refused:
            if len(batch) > 1 and self._exchange.splits:
                middle, suspect = len(batch) // 2, suspect or isinstance(refused, _EndsServers)
                halves = batch[:middle], batch[middle:]
                return [outcome for half in halves for outcome in await self._outcomes(half, suspect)]
            failure: NoScore = refused
        except NoScore as no_score:
            failure = no_score
        except Exception as error:  # else it would end the thread that all samples wait for
            show(self._hidden("".join(traceback.format_exception(error)).rstrip("\n")))  # it may be our bug
            text = self._hidden(f"its answer cannot be read: {type(error).__name__}: {error}")
            failure = NoScore(on_one_line(text, SHOWN), "crashed")
        self._failure, self._failed_at = failure, time.monotonic()
        return self._failed(failure, len(batch))

    def _failed(self, failure: NoScore, count: int) -> list[Outcome]:
        return [Outcome(self.name, failure.state, text=self._hidden(str(failure)))] * count

    def _hidden(self, text: str) -> str:
        """`text` of a service without the API keys that it was sent: for everything that is printed or kept."""
        return without(text, self._addresses.keys)

    async def _answer(self, batch: Sequence[_Waiting], suspect: bool) -> bytes:
        """The content of the service's answer with status 200. Raises NoScore where there is none, also where restarted
        servers have gone away in LOSSES (LOSSES_ALONE) attempts."""
        body = self._exchange.body([waiting.sample for waiting in batch])
        largest = LARGEST_ANSWER + LARGEST_STEP * sum(waiting.characters for waiting in batch)
        failure, pause, budget = "", FIRST_PAUSE, TimeBudget(self._limits.deadline)
        gone, unreached = 0, None  # servers that the request was sent to; since when none was reached
        while True:
            try:
                async with self._alone if gone or suspect else contextlib.nullcontext():
                    address = await self._addresses.next()
                    await self._turn()
                    begun, left = time.monotonic(), budget.left
                    reply, failure, asked = await budget.spend(self._attempt(address, body, largest))
                    if reply is not None:
                        return reply
                    await budget.spend(asyncio.sleep(max(pause, asked)))
                unreached = None
            except _Gone as server:
                failure, budget.left = str(server), left
                gone += not server.unreached
                unreached = (unreached or begun) if server.unreached else None
                if gone == (LOSSES_ALONE if len(batch) == 1 else LOSSES):
                    text = f"its server went away in {gone} attempts, the last: {failure}"
                    raise _EndsServers(text, "crashed") from None
                if unreached and time.monotonic() - unreached > self._addresses.restarts_within:
                    raise NoScore(f"no server of the reward model can be reached: {failure}", "crashed") from None
                await asyncio.sleep(pause)
            except TimeoutError:
                within = f"within reward.deadline ({self._limits.deadline:g} s)"
                if not failure:
                    raise NoScore(f"no answer {within}", "timed_out") from None
                raise NoScore(f"no rewards {within}, the last attempt: {failure}", "crashed") from None
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _attempt(self, address: Address, body: bytes, largest: int) -> tuple[bytes | None, str, float]:
        """(the answer or None, how the attempt failed, seconds that the service asks to wait). Raises NoScore for a
        final failure, and _Gone where a server that is restarted went away."""
        post = self._post if self._addresses.fixed else self._post_while_up
        try:
            status, reply, asked = await post(address, body, largest)
        except aiohttp.ClientError as error:
            failure = on_one_line(self._hidden(error_line(error)), SHOWN)
            if self._addresses.fixed:
                return None, failure, 0.0
            raise _Gone(failure, isinstance(error, UNREACHED)) from None
        if status == 200:
            return reply, "", 0.0
        failure = f"answered {status}: {on_one_line(reply.decode(errors='replace'), SHOWN)}"
        if status == 429 or status >= 500:
            return None, failure, asked
        raise (_Refused if status == 400 else NoScore)(failure, "crashed")

    async def _turn(self) -> None:
        """Waits so that no more than `per_second` requests begin in a second."""
        if self._limits.per_second is not None:
            now = time.monotonic()
            turn = max(now, self._next_turn)
            self._next_turn = turn + 1 / self._limits.per_second
            await asyncio.sleep(turn - now)

    async def _post_while_up(self, address: Address, body: bytes, largest: int) -> tuple[int, bytes, float]:
        """As `_post`. Raises _Gone where the server's address is removed meanwhile: when a host is lost, its
        connections stay open."""
        post = asyncio.create_task(self._post(address, body, largest))
        try:
            while not post.done():
                if address not in self._addresses.known:
                    raise _Gone("the server was marked failed", unreached=False)
                await asyncio.wait({post}, timeout=POLL_EVERY)
            return post.result()
        finally:
            if not post.cancel() and not post.cancelled():
                post.exception()  # else asyncio would log it, with the service's text

    async def _post(self, address: Address, body: bytes, largest: int) -> tuple[int, bytes, float]:
        """(status, content, seconds that the service asks to wait)."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        url = URL(address.url + self._exchange.path)
        # A followed redirect may become a GET, and would send the API key to another address.
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            if (encoding := reply.headers.get("Content-Encoding", "identity")) != "identity":
                shown = on_one_line(self._hidden(encoding), 40)
                raise NoScore(f"answered with Content-Encoding {shown}; asked for identity")
            answer = bytearray()
            async for part in reply.content.iter_any():
                answer += part
                if len(answer) > largest:
                    raise NoScore(f"answered {reply.status} with more than {largest} bytes")
            text = self._hidden(answer.decode(errors="surrogateescape"))
            return reply.status, text.encode(errors="surrogateescape"), _asked_pause(reply.headers)


def _asked_pause(headers: Mapping[str, str]) -> float:
    """The seconds in the header Retry-After; 0 where there are none (a date counts as none)."""
    try:
        return float(headers.get("Retry-After", 0))
    except ValueError:
        return 0.0
