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
from dynamo_megatron.reward.functions import URLS, Step
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.reward.http import HttpReward

SHOWN = 300  # characters of a problem, an answer and a response in a message
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
FUSIONS = {"sum": math.fsum, "mean": lambda values: math.fsum(values) / len(values), "product": math.prod}


class RewardError(InputError):
    """A reward function failed. The last line has the function, the prompt id, and the error's type and text; those
    before it the user's frames, the prompt and the response."""


@dataclass(frozen=True)
class Score:
    """`status` is "ok", "reward_timeout" or "reward_error"; `parts` holds each function's value where it is "ok", and
    `failure` says in one line which function failed, and how, where it is not. `steps`: those that the functions
    reward."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    failure: str = field(default="", compare=False)
    steps: list[Step] = field(default_factory=list)


class RewardPool:
    """Scores responses with `config.workers` processes, one sample each at a time, and with the services that are URLs.

    A sample has `config.deadline` seconds from when a worker takes it up; waiting for a free worker does not count. A
    worker that is late, even inside C code, is killed together with all that it has started, and replaced; the sample
    gets reward 0 and status "reward_timeout". A function that fails (raises, ends its process, returns no finite
    number) raises RewardError, or gives reward 0 and status "reward_error" (`config.on_error`). The same holds for a
    service, by `HttpReward`'s rules; where all functions are services there are no processes.
    The reward is `config.fusion` over the functions' values; a sample succeeds where the first function gives at least
    `config.success_threshold`. `prime` is no function of a response: the ranks compute it (`Policy.implicit_rewards`).
    May be used from any event loop and thread.
    """

    def __init__(self, config: RewardConfig) -> None:
        if len(set(config.functions)) < len(config.functions):
            raise InputError(f"reward.functions: a function is named twice in {config.functions}")
        self._config = config
        self._local = [name for name in config.outcomes if not name.startswith(URLS)]
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
        replies = []
        if self._local:
            loop = asyncio.get_running_loop()
            replies.append(loop.run_in_executor(self._threads, self._run_local, prompt, response))
        replies += [service.score(prompt, response) for service in self._services]
        return self._combined(prompt, response, await asyncio.gather(*replies))

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

        variable = self._config.api_key_env
        if variable is not None and not os.environ.get(variable):
            raise InputError(f"reward.api_key_env: the environment variable {variable} is not set")
        key = os.environ[variable] if variable is not None else ""
        for name in self._config.outcomes:
            if name not in self._local:
                service = HttpReward(name, self._config.deadline, key)
                service.start()
                self._services.append(service)

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
            if not self._closed:
                self._workers.remove(worker)
                worker.connection.close()
        return self._spawn()

    def _run_local(self, prompt: Prompt, response: str) -> tuple:
        """As `_Worker.run`."""
        worker = self._idle.get_nowait()  # there are as many workers as threads
        try:
            if worker.process.poll() is not None:
                worker = self._replace(worker)
            worker.wait_ready(time.monotonic() + START_TIMEOUT)
            reply = worker.run(prompt, response, self._config.deadline)
            if reply[0] in ("timeout", "died"):
                # Replaced before the next sample comes, so that it need not wait for the imports.
                worker = self._replace(worker)
        except (ValueError, OSError) as error:  # a worker cannot be started any more
            reply = ("error", " or ".join(self._local), on_one_line(str(error), SHOWN))
        finally:
            self._idle.put(worker)
        return reply

    def _combined(self, prompt: Prompt, response: str, replies: list[tuple]) -> Score:
        """Each of `replies` is ("parts", {function: value}, *steps), ("timeout", function, text), or, with any other
        first word, a failure: (word, function, text, [frames])."""
        late = next((reply for reply in replies if reply[0] == "timeout"), None)
        failed = next((reply for reply in replies if reply[0] not in ("parts", "timeout")), None)
        if failed is None and late is None:
            values = {name: value for _, parts, *_ in replies for name, value in parts.items()}
            parts = {name: values[name] for name in self._config.outcomes}
            steps = [step for reply in replies for step in reply[2:]]
            reward = FUSIONS[self._config.fusion](list(parts.values()))
            if abs(reward) <= LARGEST_REWARD:
                success = parts[self._config.outcomes[0]] >= self._config.success_threshold
                return Score(reward, success, parts, steps=steps)
            text = f"their {self._config.fusion} is {reward:g}, of more than {LARGEST_REWARD:g} in size"
            failed = ("error", ", ".join(parts), text)
        if failed is not None and self._config.on_error == "raise":
            raise RewardError(_failure(prompt, response, *failed[1:]))
        if failed is not None:
            return Score(0.0, False, status="reward_error", failure=f"{failed[1]}: {failed[2]}")
        return Score(0.0, False, status="reward_timeout", failure=f"{late[1]}: {late[2]}")


def _failure(prompt: Prompt, response: str, function: str, text: str, frames: str = "") -> str:
    problem = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
    lines = [
        *([frames] if frames else []),
        f"prompt {prompt.label}: {_shown(problem)!r}, answer {_shown(prompt.answer)!r}",
        f"response of {len(response)} characters: {_shown(response)!r}",
        f"reward function {function} failed on prompt {prompt.label}: {text}",
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

    def run(self, prompt: Prompt, response: str, deadline: float) -> tuple:
        """The worker's answer, ("died", functions, how), or ("timeout", functions, text) after `deadline` seconds."""
        names = " or ".join(self._functions)
        try:
            self.connection.send((prompt, response))
            if not self.connection.poll(deadline):
                return ("timeout", names, f"no value within reward.deadline ({deadline:g} s)")
            return self.connection.recv()
        except RecursionError:
            return ("error", names, "the problem is nested too deep to be sent to a worker")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return ("died", names, f"its process ended: {self._how_it_ended()}")

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
