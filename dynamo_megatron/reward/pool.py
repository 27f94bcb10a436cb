"""Reward functions run in worker processes or behind HTTP, with a deadline that stops even C code."""

from __future__ import annotations

import asyncio
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.config.reward import URLS
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import SERVICES, FunctionResult, RewardError, Step
from dynamo_megatron.runtime import guard
from dynamo_megatron.runtime.cores import usable_cores
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.reward.http import HttpReward

SHOWN = 300  # characters of a problem, an answer or a response in a message
WORKER = (sys.executable, "-P", "-m", "dynamo_megatron.reward.worker")
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
END_TIMEOUT = 30.0  # seconds for a worker to end with all that it has started: mostly 0.1, more on a busy machine
FUSIONS = {"sum": math.fsum, "mean": lambda values: math.fsum(values) / len(values), "product": math.prod}


@dataclass(frozen=True)
class Score:
    """`status` is "ok", "reward_timeout" or "reward_error". `parts` has the value of each function that gave one, and
    `failures` the state of each that gave none (`types.REWARD_STATES`). `failure` says in one line which function
    failed first, and how. `steps` is empty unless all functions gave a value. `answer`: `FunctionResult.answer` of the
    first function that reads one."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    failure: str = field(default="", compare=False)
    failures: dict[str, str] = field(default_factory=dict, compare=False)
    steps: list[Step] = field(default_factory=list)
    answer: str | None = field(default=None, compare=False)


class RewardPool:
    """Scores responses with worker processes (`Workers`) and with services: URLs, `judge` and `reward_model`.

    A sample that is late gets reward 0 and status "reward_timeout". Where a function or service fails, `score` raises
    RewardError, or the sample gets reward 0 and status "reward_error" (`config.on_error`). `prime` is not computed here
    but by the ranks (`Policy.implicit_rewards`). May be used from one event loop after the other.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._local = [name for name in config.outcomes if not name.startswith(URLS) and name not in SERVICES]
        self._services: list[HttpReward] = []
        self._workers: Workers | None = None
        self._closed = False

    def start(self) -> None:
        """Checks that the services accept connections, starts the workers and waits until all are ready. Raises
        ValueError where one of these fails, TimeoutError naming a worker that is not ready in time."""
        try:
            for name in self._config.outcomes:
                if name not in self._local:
                    self._services.append(self._service(name))
                    self._services[-1].start()
            if self._local:
                self._workers = Workers(self._local, self._config)
                self._workers.start()
        except BaseException:
            self.close()
            raise

    async def score(self, prompt: Prompt, response: str) -> Score:
        """Scores one response. Raises RewardError where a function fails and `on_error` is `raise`, RuntimeError where
        the pool is not open."""
        if self._closed or not (self._workers or self._services):
            raise RuntimeError("the reward pool is not open: call start() first, and score nothing after close()")
        local = asyncio.wrap_future(self._workers.submit(prompt, response)) if self._workers else None
        results = await asyncio.gather(*(service.score(prompt, response) for service in self._services))
        return self._combined(prompt, response, [*(await local if local else []), *results])

    def close(self) -> None:
        """Stops all workers and closes all connections now; samples under way are lost. May be called twice."""
        self._closed = True
        for service in self._services:
            service.close()
        if self._workers is not None:
            self._workers.close()

    def _service(self, name: str) -> HttpReward:
        # Not at the top: the workers import this file too, and aiohttp would slow their start.
        from dynamo_megatron.reward.http import Judge, RewardModel, UrlService

        if name == "judge":
            return Judge(self._config)
        return RewardModel(self._config) if name == "reward_model" else UrlService(name, self._config)

    def _combined(self, prompt: Prompt, response: str, results: list[FunctionResult]) -> Score:
        by_name = {result.function: result for result in results if result.state == "scored"}
        scored = [by_name[name] for name in self._config.outcomes if name in by_name]
        parts = {result.function: result.value for result in scored}
        failures = [result for result in results if result.state != "scored"]
        if not failures:
            reward = FUSIONS[self._config.fusion](list(parts.values()))
            if abs(reward) <= LARGEST_REWARD:
                success = parts[self._config.outcomes[0]] >= self._config.success_threshold
                steps = [step for result in scored for step in result.steps]
                answer = next((result.answer for result in scored if result.answer is not None), None)
                return Score(reward, success, parts, steps=steps, answer=answer)
            text = f"their {self._config.fusion} is {reward:g}, of more than {LARGEST_REWARD:g} in size"
            failures = [FunctionResult(", ".join(parts), "wrong_format", text=text)]
        first = min(failures, key=lambda result: result.state == "timed_out")  # an error counts before a timeout
        status = "reward_timeout" if first.state == "timed_out" else "reward_error"
        if status == "reward_error" and self._config.on_error == "raise":
            raise RewardError(_failure(prompt, response, first))
        states = {result.function: result.state for result in failures}
        return Score(0.0, False, parts, status, f"{first.function}: {first.text}", states)


def _failure(prompt: Prompt, response: str, failed: FunctionResult) -> str:
    problem = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
    lines = [
        *([failed.frames] if failed.frames else []),
        f"prompt {prompt.label}: {on_one_line(problem, SHOWN)!r}, answer {on_one_line(repr(prompt.answer), SHOWN)}",
        f"response of {len(response)} characters: {on_one_line(response, SHOWN)!r}",
        f"reward function {failed.function} failed on prompt {prompt.label}: {failed.text}",
    ]
    return "\n".join(lines)


# Worker processes


def processes(config: RewardConfig) -> int:
    """How many worker processes there are."""
    return config.workers or min(32, max(2, usable_cores() // 4))


class Workers:
    """`processes` of them that run `functions`. May be used from any thread."""

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self.workers = [Worker(functions, config) for _ in range(processes(config))]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self._free.put(worker)
        # Blocking reads in threads, not asyncio's: the pool outlives event loops.
        self._threads = ThreadPoolExecutor(len(self.workers))

    def start(self) -> None:
        """Waits until all are ready. Raises as `Worker.wait_ready`."""
        for worker in self.workers:
            worker.wait_ready()

    def submit(self, prompt: Prompt, response: str) -> Future[list[FunctionResult]]:
        """One result per function, up to the first one that took all of the deadline or ended its process."""
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        for worker in self.workers:
            worker.close()  # all at once: each takes a moment to end
        for worker in self.workers:
            worker.end()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        worker = self._free.get()
        try:
            return worker.run(prompt, response)
        finally:
            self._free.put(worker)


class Worker:
    """A process that runs `functions`.

    A sample has `config.deadline` seconds. A process that is late, even inside C code, is killed together with all
    processes that it has started, and replaced.
    """

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self.deadline = config.deadline
        self._given = functions, config
        self._lock, self._closed = threading.Lock(), False
        self._start()

    def run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        """Returns what `Workers.submit` promises. Raises RuntimeError after `close`."""
        try:
            if self.process.poll() is not None:
                self._start()
            try:
                self.wait_ready()
            except TimeoutError:
                self.end()  # so that the next sample starts another one, and does not fail at once
                raise
            results = self._results(prompt, response)
            if self.process.poll() is not None:
                self._start()  # now, so that the next sample need not wait for the imports
            return results
        except (ValueError, OSError, RecursionError) as error:  # no process can be started; too deep a problem
            text = on_one_line(str(error), SHOWN)
            return [FunctionResult(name, "crashed", text=text) for name in self._given[0]]

    def wait_ready(self) -> None:
        """Waits for the process's imports. Raises TimeoutError, InputError if a function cannot be loaded, RewardError
        if the process has ended."""
        if self._ready:
            return
        if not self._connection.poll(max(0.0, self._begun + START_TIMEOUT - time.monotonic())):
            names = ", ".join(self._given[0])
            raise TimeoutError(f"waited {START_TIMEOUT:.0f} s for reward worker {self.process.pid} to import {names}")
        try:
            status, *message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise RewardError(f"a reward worker ended while it started: {self._how_it_ended()}") from None
        if status == "failed":
            raise InputError(message[0])
        self._ready = True

    def close(self) -> None:
        """Begins to end the process, and starts no other one."""
        with self._lock:
            self._closed = True
            self.process.stdin.close()

    def end(self) -> None:
        """Ends the process and all that it has started."""
        guard.end(self.process, END_TIMEOUT)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with self._lock, ours, theirs:
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            self.process = guard.guarded([*WORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
            self._connection, self._ready, self._begun = Connection(ours.detach()), False, time.monotonic()
        self._connection.send(self._given)

    def _results(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        end = time.monotonic() + self.deadline
        results: list[FunctionResult] = []
        try:
            self._connection.send((prompt, response))
            for name in self._given[0]:
                if not self._connection.poll(max(0.0, end - time.monotonic())):
                    self.end()
                    text = f"no value within reward.deadline ({self.deadline:g} s)"
                    return [*results, FunctionResult(name, "timed_out", text=text)]
                results.append(self._connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            ended = f"its process ended: {self._how_it_ended()}"
            self.end()  # where what it has started holds it
            results.append(FunctionResult(self._given[0][len(results)], "crashed", text=ended))
        return results

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"what it has started has not ended for {END_TIMEOUT:g} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
