"""The HTTP client of the rewards that services compute: `judge`, `reward_model`, and URLs in `reward.functions`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, NoScore
from dynamo_megatron.reward.services import Service
from dynamo_megatron.runtime.plain_text import error_line, on_one_line
from dynamo_megatron.types import Prompt

CONNECT_TIMEOUT = 5.0  # seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 2.0  # seconds before a request is sent again, doubled each time
LOSSES = 3  # servers that may go away while they have a request: the request may be the reason
POLL_EVERY = 0.2  # seconds
SHOWN = 200  # characters of an answer in a message


@dataclass(frozen=True)
class Address:
    """`api_key` is sent as "Authorization: Bearer KEY"; with "" no such header is sent."""

    url: str
    api_key: str = field(default="", repr=False)


class Addresses:
    """The addresses that requests go to, in turn. One thread may change them while others read."""

    def __init__(self, given: Iterable[Address] = (), restarts_within: float = 0.0) -> None:
        """`restarts_within`: how long to wait for a server while none is up, in seconds; 0: the addresses are fixed."""
        self.known = list(given)  # replaced by a new list, never changed in place
        self.restarts_within = restarts_within
        self._up: dict[str, Address] = {}
        self._turns = itertools.count()
        self._why_none, self._final = "none has come up", False

    def up(self, name: str, address: Address) -> None:
        self._up[name] = address
        self.known = list(self._up.values())

    def down(self, name: str, why: str, final: bool = False) -> None:
        """Removes the server `name`; `why` is for error messages. `final`: no server will come up again."""
        self._up.pop(name, None)
        self.known = list(self._up.values())
        self._why_none, self._final = f"{name}: {why}", final

    async def next(self) -> Address:
        """Returns the next address; waits while no server is up. Raises NoScore if none comes up in time."""
        end = time.monotonic() + self.restarts_within
        while not (known := self.known):
            if self._final or time.monotonic() > end:
                raise NoScore(f"no server of the reward model is up; {self._why_none}", "crashed")
            await asyncio.sleep(POLL_EVERY)
        return known[next(self._turns) % len(known)]


class HttpReward:
    """The reward function that `service` computes.

    A request is sent again, after increasing pauses, if the connection fails or the answer is 429 or 5xx; any other
    answer is final. A request and its repeats have `deadline` seconds; waiting for a free request does not count, nor
    do attempts that end with a server that is restarted; such repeats go one at a time, so that a request that ends
    servers is not held against the others. Samples may come from any event loop and thread.
    """

    def __init__(
        self,
        service: Service,
        addresses: Addresses,
        *,
        deadline: float,
        concurrency: int,
        per_second: float | None = None,
        cached: int = 0,
    ) -> None:
        """`concurrency`: requests under way at once. `per_second`: how many may be sent per second, repeats included;
        None: no limit. `cached`: how many of the last used scores are kept."""
        self.name = service.name
        self._service, self._addresses, self._deadline = service, addresses, deadline
        self._concurrency, self._per_second, self._cached = concurrency, per_second, cached
        self._cache: OrderedDict[bytes, FunctionResult] = OrderedDict()
        self._next_turn = 0.0  # monotonic seconds
        self._loop = asyncio.new_event_loop()
        self._end, self._alone = asyncio.Event(), asyncio.Lock()
        self._waiting: asyncio.Queue[tuple[bytes, int, asyncio.Future[FunctionResult]]] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name=f"reward {self.name}", daemon=True)

    def start(self) -> None:
        """Raises ValueError (one line) for a malformed URL, and if no service accepts connections at the URL."""
        for address in self._addresses.known:
            try:
                url = URL(address.url)
                socket.create_connection((url.host, url.port), CONNECT_TIMEOUT).close()
            except (ValueError, OSError) as error:  # ValueError: an impossible port or host name
                what = f"reward.functions: {self.name}: {address.url}"
                raise InputError(f"{what}: cannot connect, is the service up? ({error})") from error
        self._thread.start()

    async def score(self, prompt: Prompt, response: str) -> FunctionResult:
        """The result of one response: "timed_out" if no answer came within the deadline, "crashed" if an attempt failed
        before it passed."""
        try:
            sample = self._service.sample(prompt, response)
        except (ValueError, TypeError, RecursionError) as error:  # nesting, digits, keys that are not text
            return FunctionResult(self.name, "crashed", text=on_one_line(f"the problem cannot be sent: {error}", SHOWN))
        return await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._result(sample, len(response)), self._loop)
        )

    def close(self) -> None:
        """Stops the requests under way and the thread, and cancels waiting samples. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # it cancels the samples that wait at the end
            runner.run(self._serve())

    async def _serve(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as self._session,
            asyncio.TaskGroup() as group,
        ):
            senders = [group.create_task(self._send()) for _ in range(self._concurrency)]
            await self._end.wait()
            for sender in senders:
                sender.cancel()

    async def _result(self, sample: bytes, characters: int) -> FunctionResult:
        key = hashlib.sha256(sample).digest()
        if (kept := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return kept
        waiting = self._loop.create_future()
        self._waiting.put_nowait((sample, characters, waiting))
        result = await waiting
        if self._cached and result.state == "scored":
            self._cache[key] = result
            if len(self._cache) > self._cached:
                self._cache.popitem(last=False)
        return result

    async def _send(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._service.batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                reply = await self._reply(self._service.body([sample for sample, _, _ in batch]))
                results = self._service.results(reply, [characters for _, characters, _ in batch])
            except NoScore as failure:
                results = [FunctionResult(self.name, failure.state, text=str(failure))] * len(batch)
            except Exception as error:  # else the samples would wait for ever
                text = on_one_line(f"its answer cannot be read: {error_line(error)}", SHOWN)
                results = [FunctionResult(self.name, "crashed", text=text)] * len(batch)
            for (_, _, future), result in zip(batch, results, strict=True):
                if not future.cancelled():
                    future.set_result(result)

    async def _reply(self, body: bytes) -> bytes:
        """The content of the service's answer with status 200. Raises NoScore if there is none."""
        failure, pause, left, lost = "", FIRST_PAUSE, self._deadline, 0
        while True:
            async with self._alone if lost else contextlib.nullcontext():
                address = await self._addresses.next()
                await self._turn()
                begun, restarted = time.monotonic(), False
                try:
                    async with asyncio.timeout(left), self._post(address, body) as answer:
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
                    restarted = self._addresses.restarts_within > 0
                    lost += restarted and not isinstance(error, aiohttp.ClientConnectorError)
                    if lost == LOSSES:
                        raise NoScore(f"its server went away in {lost} attempts: {failure}", "crashed") from None
                except TimeoutError:
                    within = f"within reward.deadline ({self._deadline:g} s)"
                    if not failure:
                        raise NoScore(f"no answer {within}", "timed_out") from None
                    raise NoScore(f"no rewards {within}, the last attempt: {failure}", "crashed") from None
            await asyncio.sleep(min(pause, max(left, 0.0)))
            left -= 0.0 if restarted else time.monotonic() - begun
            pause = min(2 * pause, LONGEST_PAUSE)

    def _post(self, address: Address, body: bytes) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {address.api_key}"}
        if not address.api_key:
            del headers["Authorization"]
        # A followed redirect may become a GET, and would send the API key to another address.
        url = URL(address.url + self._service.path)
        return self._session.post(url, data=body, headers=headers, allow_redirects=False)

    async def _turn(self) -> None:
        """Waits so that no more than `per_second` requests begin in a second."""
        if self._per_second is not None:
            now = time.monotonic()
            turn = max(now, self._next_turn)
            self._next_turn = turn + 1 / self._per_second
            await asyncio.sleep(turn - now)
