"""Reward functions in worker processes, with a deadline that stops even C code."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, RewardError
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import Prompt

Runner = Callable[[Prompt, str], list[FunctionResult]]
GUARD = ("-P", "-m", "dynamo_megatron.runtime.guard", "--")
WORKER = ("-P", "-m", "dynamo_megatron.reward.worker")
SHOWN = 300  # characters of a worker's start error in a message
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
END_TIMEOUT = 30.0  # seconds for a worker to end with all that it has started: mostly 0.1, more on a busy machine


class Pool:
    """Gives samples to `runners`, to each one sample at a time. May be used from any thread."""

    def __init__(self, runners: Iterable[Runner]) -> None:
        self._free: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for runner in runners:
            self._free.put(runner)
        # Blocking reads in threads, not asyncio's: the pool outlives event loops.
        self._threads = ThreadPoolExecutor(self._free.qsize(), thread_name_prefix="reward")

    def submit(self, prompt: Prompt, response: str) -> Future[list[FunctionResult]]:
        """One result per function, up to the first one that took all of the deadline or ended its process."""
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Drops the samples that wait, and waits for those under way. May be called twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        runner = self._free.get()  # does not wait: as many runners as threads
        try:
            return runner(prompt, response)
        finally:
            self._free.put(runner)


class Workers(Pool):
    """`config.workers` processes on this machine that run `functions`."""

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self.workers = [Worker(functions, config) for _ in range(config.workers)]
        super().__init__(worker.run for worker in self.workers)

    def start(self) -> None:
        """Waits until all are ready. Raises as `Worker.wait_ready`."""
        for worker in self.workers:
            worker.wait_ready()

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        for worker in self.workers:
            worker.close()  # all at once: each takes a moment to end
        for worker in self.workers:
            worker.end()
        super().close()


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
        """As `Pool.submit`. Raises RuntimeError after `close`."""
        try:
            if self.process.poll() is not None:
                self._start()
            self.wait_ready()
            results = self._results(prompt, response)
            if self.process.poll() is not None:
                self._start()  # now, so that the next sample need not wait for the imports
            return results
        except (ValueError, OSError, RecursionError) as error:  # no process can be started, or the problem is too deep
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
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=END_TIMEOUT)
        self.process.kill()  # in case that took too long: the worker dies with this process, what it started may not

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with self._lock, ours, theirs:
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            command = [sys.executable, *GUARD, sys.executable, *WORKER, str(theirs.fileno())]
            # A session of its own: Ctrl-C in the terminal must reach only the parent.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, start_new_session=True
            )
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
            results.append(FunctionResult(self._given[0][len(results)], "crashed", text=ended))
        return results

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"what it has started has not ended for {END_TIMEOUT:g} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
