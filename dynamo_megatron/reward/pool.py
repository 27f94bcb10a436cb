"""Reward functions run in processes of their own or behind HTTP, under a deadline that holds against anything."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.addresses import Address, Addresses
from dynamo_megatron.reward.functions import SERVICES, URLS, Step
from dynamo_megatron.reward.outcomes import Outcome
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.reward.exchanges import Exchange
    from dynamo_megatron.reward.http import HttpReward, Limits

SHOWN = 300  # characters of a problem, an answer and a response in a message
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
FUSIONS = {"sum": math.fsum, "mean": lambda values: math.fsum(values) / len(values), "product": math.prod}


class RewardError(InputError):
    """A reward function failed. The last line has the function, the prompt id, and the error's type and text; those
    before it the user's frames, the prompt and the response."""


@dataclass(frozen=True)
class Score:
    """`status` is "ok", "reward_timeout" or "reward_error". `parts` holds the value of each function that gave one,
    `failures` the state of each that gave none (`types.REWARD_STATES`), and `failure` says in one line which function
    failed first, and how; "" where none did. `steps`: those that the functions reward, where all gave a value."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    failure: str = field(default="", compare=False)
    failures: dict[str, str] = field(default_factory=dict, compare=False)
    steps: list[Step] = field(default_factory=list)


class RewardPool:
    """Scores responses with `config.workers` processes, one sample each at a time, and with services: URLs, `judge` and
    `reward_model`.

    A sample has `config.deadline` seconds from when a worker takes it up; waiting for a free worker does not count. A
    worker that is late, even inside C code, is killed together with all that it has started, and replaced; the sample
    gets reward 0 and status "reward_timeout". A function that fails (raises, ends its process, returns no finite
    number) raises RewardError, or gives reward 0 and status "reward_error" (`config.on_error`). The same holds for a
    service, by `HttpReward`'s rules; where all functions are services there are no processes.
    The reward is `config.fusion` over the functions' values; a sample succeeds where the first function gives at least
    `config.success_threshold`. `prime` is no function of a response: the ranks compute it (`Policy.implicit_rewards`).
    May be used from any event loop and thread.
    """

    def __init__(self, config: RewardConfig, servers: Addresses | None = None) -> None:
        """`servers`: those of `config.servers`, which somebody else looks after."""
        if len(set(config.functions)) < len(config.functions):
            raise InputError(f"reward.functions: a function is named twice in {config.functions}")
        self._config, self._servers = config, servers
        self._local = [name for name in config.outcomes if not name.startswith(URLS) and name not in SERVICES]
        self._services: list[HttpReward] = []
        # Blocking reads in threads, not asyncio's: the pool outlives event loops.
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Sees that the services take connections, starts the workers and waits until all are ready.

        Raises ValueError where a service is down or a function cannot be loaded, TimeoutError naming the workers that
        are not ready in time.
        """
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(self.close)
            self._open_services()
            started = [self._threads.submit(self._spawn) for _ in range(self._config.workers if self._local else 0)]
            workers = [future.result() for future in started]
            end = time.monotonic() + START_TIMEOUT
            for worker in workers:
                worker.wait_ready(end)
                self._idle.put(worker)
            unless_started.pop_all()

    async def score(self, prompt: Prompt, response: str) -> Score:
        """Scores one response. Raises RewardError with `on_error: raise`, RuntimeError on a pool that is not open."""
        if self._closed or not (self._workers or self._services):
            raise RuntimeError("the reward pool is not open: call start() first, and score nothing after close()")
        asked = [service.score(prompt, response) for service in self._services]
        if self._local:
            loop = asyncio.get_running_loop()
            local = loop.run_in_executor(self._threads, self._run_local, prompt, response)
            outcomes, *others = await asyncio.gather(local, *asked)
        else:
            outcomes, others = [], await asyncio.gather(*asked)
        return self._combined(prompt, response, [*outcomes, *others])

    def close(self) -> None:
        """Ends all workers and requests now; samples under way are lost. May be called twice."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.process.stdin.close()  # all at once: each takes a moment to end
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)  # their reads end with the workers
        for worker in self._workers:
            worker.connection.close()
        for service in self._services:
            service.close()

    def _open_services(self) -> None:
        if len(self._local) == len(self._config.outcomes):
            return
        # Not at the top: the workers import this file too, and aiohttp would slow their start.
        from dynamo_megatron.reward.http import HttpReward

        for name in self._config.outcomes:
            if name not in self._local:
                service = HttpReward(*self._service(name))
                service.start()
                self._services.append(service)

    def _service(self, name: str) -> tuple[Exchange, Addresses, Limits]:
        from dynamo_megatron.reward.exchanges import Judge, OwnService, RewardModel
        from dynamo_megatron.reward.http import BATCH, REQUESTS, Limits

        config = self._config
        if name == "judge":
            judge = config.judge
            key = key_of(judge.api_key_env, "reward.judge.api_key_env")
            limits = Limits(config.deadline, judge.concurrency, judge.requests_per_second, config.cache)
            return Judge(judge), Addresses([Address(judge.url.rstrip("/"), key)]), limits
        if name == "reward_model":
            model = config.reward_model
            key = key_of(model.api_key_env, "reward.reward_model.api_key_env")
            given = Addresses(Address(url.rstrip("/"), key) for url in model.urls)
            limits = Limits(config.deadline, model.concurrency, model.requests_per_second, config.cache)
            return RewardModel(model, BATCH), self._servers or given, limits
        key = key_of(config.api_key_env, "reward.api_key_env")
        return (
            OwnService(name, BATCH),
            Addresses([Address(name, key)]),
            Limits(config.deadline, REQUESTS, cached=config.cache),
        )

    def _spawn(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            worker = _Worker(self._local, self._config)
            self._workers.append(worker)
            return worker

    def _replace(self, worker: _Worker) -> _Worker:
        with self._lock:
            worker.kill()
        another = self._spawn()  # where it cannot be started, the old one stays, for the next try
        with self._lock:
            if not self._closed:
                self._workers.remove(worker)
                worker.connection.close()
        return another

    def _run_local(self, prompt: Prompt, response: str) -> list[Outcome]:
        """As `_Worker.run`."""
        worker = self._idle.get_nowait()  # there are as many workers as threads
        try:
            if worker.process.poll() is not None:
                worker = self._replace(worker)
            worker.wait_ready(time.monotonic() + START_TIMEOUT)
            outcomes, usable = worker.run(prompt, response, self._config.deadline)
            if not usable:
                # Replaced before the next sample comes, so that it need not wait for the imports.
                worker = self._replace(worker)
        except (ValueError, OSError) as error:  # a worker cannot be started any more
            text = on_one_line(str(error), SHOWN)
            outcomes = [Outcome(name, "crashed", text=text) for name in self._local]
        finally:
            self._idle.put(worker)
        return outcomes

    def _combined(self, prompt: Prompt, response: str, outcomes: list[Outcome]) -> Score:
        by_name = {outcome.function: outcome for outcome in outcomes}
        scored = [by_name[n] for n in self._config.outcomes if n in by_name and by_name[n].state == "scored"]
        parts = {outcome.function: outcome.value for outcome in scored}
        failures = {outcome.function: outcome.state for outcome in outcomes if outcome.state != "scored"}
        late = next((outcome for outcome in outcomes if outcome.state == "timed_out"), None)
        failed = next((outcome for outcome in outcomes if outcome.state in ("wrong_format", "crashed")), None)
        if failed is None and late is None:
            reward = FUSIONS[self._config.fusion](list(parts.values()))
            if abs(reward) <= LARGEST_REWARD:
                success = parts[self._config.outcomes[0]] >= self._config.success_threshold
                steps = [step for outcome in scored for step in outcome.steps]
                return Score(reward, success, parts, steps=steps)
            text = f"their {self._config.fusion} is {reward:g}, of more than {LARGEST_REWARD:g} in size"
            failed = Outcome(", ".join(parts), "wrong_format", text=text)
        if failed is not None and self._config.on_error == "raise":
            raise RewardError(_failure(prompt, response, failed))
        status, first = ("reward_error", failed) if failed is not None else ("reward_timeout", late)
        return Score(0.0, False, parts, status, f"{first.function}: {first.text}", failures)


def key_of(variable: str | None, key: str) -> str:
    """What the environment variable holds that the configuration's `key` names; "" for None. Raises InputError."""
    if variable is not None and not os.environ.get(variable):
        raise InputError(f"{key}: the environment variable {variable} is not set")
    return os.environ[variable] if variable is not None else ""


def _failure(prompt: Prompt, response: str, failed: Outcome) -> str:
    problem = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
    lines = [
        *([failed.frames] if failed.frames else []),
        f"prompt {prompt.label}: {_shown(problem)!r}, answer {_shown(prompt.answer)!r}",
        f"response of {len(response)} characters: {_shown(response)!r}",
        f"reward function {failed.function} failed on prompt {prompt.label}: {failed.text}",
    ]
    return "\n".join(lines)


def _shown(value: object) -> str:
    try:
        return on_one_line(str(value), SHOWN)
    except (ValueError, RecursionError):  # of thousands of digits, or nested as deep
        return f"a value of type {type(value).__name__} that cannot be shown"


class _Worker:
    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self._functions = functions
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            guard = [sys.executable, "-P", "-m", "dynamo_megatron.runtime.subreaper", descriptor]
            self.process = subprocess.Popen(
                [*guard, sys.executable, "-P", "-m", "dynamo_megatron.reward.worker", descriptor],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's
            )
        self.connection = Connection(ours.detach())
        self.connection.send((functions, config))

    def wait_ready(self, end: float) -> None:
        """Waits until `end` (time.monotonic) for the worker's imports."""
        if self._ready:
            return
        if not self.connection.poll(max(0.0, end - time.monotonic())):
            raise TimeoutError(
                f"waited {START_TIMEOUT:.0f} s for reward worker {self.process.pid} "
                f"to import {', '.join(self._functions)}"
            )
        try:
            status, *message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise RewardError(f"a reward worker ended while it started: {self._how_it_ended()}") from None
        if status == "failed":
            raise InputError(message[0])
        self._ready = True

    def run(self, prompt: Prompt, response: str, deadline: float) -> tuple[list[Outcome], bool]:
        """(an outcome for each function, but for those after one that took all of the `deadline` seconds or ended the
        process; whether the worker can be used again)."""
        end = time.monotonic() + deadline
        outcomes: list[Outcome] = []
        try:
            self.connection.send((prompt, response))
            for name in self._functions:
                if not self.connection.poll(max(0.0, end - time.monotonic())):
                    text = f"no value within reward.deadline ({deadline:g} s)"
                    return [*outcomes, Outcome(name, "timed_out", text=text)], False
                outcomes.append(self.connection.recv())
        except RecursionError:
            text = "the problem is nested too deep to be sent to a worker"
            return [Outcome(name, "crashed", text=text) for name in self._functions], True
        except (EOFError, BrokenPipeError, ConnectionResetError):
            name = self._functions[len(outcomes)]
            return [*outcomes, Outcome(name, "crashed", text=f"its process ended: {self._how_it_ended()}")], False
        return outcomes, True

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "what it has started has not ended for 5 s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Ends the worker and all that it has started."""
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self.process.kill()  # where that took too long: the worker at least dies with it
