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
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import FunctionResult, RewardError
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import Prompt

SHOWN = 300  # characters of a worker's start error in a message
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
END_TIMEOUT = 30.0  # seconds for a worker to end with all that it has started: mostly 0.1, more on a busy machine


class Workers:
    """`config.workers` processes on this machine that run `functions`, each on one sample at a time.

    A sample has `config.deadline` seconds from when a worker begins with it; waiting for a free worker does not count.
    A worker that is late, even inside C code, is killed together with all processes that it has started, and replaced.
    May be used from any thread.
    """

    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self.processes: list[_Worker] = []
        self._functions, self._config = functions, config
        # Blocking reads in threads, not asyncio's: the pool outlives event loops.
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Starts the workers and waits until all are ready. Raises as `_Worker.wait_ready`."""
        workers = [self._spawn() for _ in range(self._config.workers)]
        end = time.monotonic() + START_TIMEOUT
        for worker in workers:
            worker.wait_ready(end)
            self._idle.put(worker)

    def submit(self, prompt: Prompt, response: str) -> Future[list[FunctionResult]]:
        """One result per function, up to the first one that took all of the deadline or ended its process."""
        return self._threads.submit(self._run, prompt, response)

    def close(self) -> None:
        """Stops all workers now; samples under way are lost. May be called twice."""
        with self._lock:
            self._closed = True
            for worker in self.processes:
                worker.process.stdin.close()  # all at once: each takes a moment to end
            for worker in self.processes:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)  # the threads' reads end with the workers
        for worker in self.processes:
            worker.connection.close()

    def _spawn(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool was closed")
            worker = _Worker(self._functions, self._config)
            self.processes.append(worker)
            return worker

    def _replace(self, worker: _Worker) -> _Worker:
        with self._lock:
            worker.kill()
        another = self._spawn()  # if this fails, the old one stays in the list, and the next sample tries again
        with self._lock:
            if not self._closed:
                self.processes.remove(worker)
                worker.connection.close()
        return another

    def _run(self, prompt: Prompt, response: str) -> list[FunctionResult]:
        worker = self._idle.get()  # does not wait: as many workers as threads
        try:
            if worker.process.poll() is not None:
                worker = self._replace(worker)
            worker.wait_ready(time.monotonic() + START_TIMEOUT)
            results, usable = worker.run(prompt, response, self._config.deadline)
            if not usable:
                # Replaced before the next sample comes, so that the sample need not wait for the imports.
                worker = self._replace(worker)
            return results
        except (ValueError, OSError, RecursionError) as error:  # no worker can be started, or the problem is too deep
            text = on_one_line(str(error), SHOWN)
            return [FunctionResult(name, "crashed", text=text) for name in self._functions]
        finally:
            self._idle.put(worker)


class _Worker:
    def __init__(self, functions: list[str], config: RewardConfig) -> None:
        self._functions = functions
        self._ready = False
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = str(theirs.fileno())
            guard = [sys.executable, "-P", "-m", "dynamo_megatron.runtime.guard", "--"]
            self.process = subprocess.Popen(
                [*guard, sys.executable, "-P", "-m", "dynamo_megatron.reward.worker", descriptor],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal must reach only the parent
            )
        self.connection = Connection(ours.detach())
        self.connection.send((functions, config))

    def wait_ready(self, end: float) -> None:
        """Waits until `end` (time.monotonic) for the worker's imports. Raises TimeoutError, InputError if a function
        cannot be loaded, RewardError if the worker has ended."""
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

    def run(self, prompt: Prompt, response: str, deadline: float) -> tuple[list[FunctionResult], bool]:
        """(one result per function, up to the first one that took all of the `deadline` seconds or ended the process;
        whether the worker can be used again)."""
        end = time.monotonic() + deadline
        results: list[FunctionResult] = []
        try:
            self.connection.send((prompt, response))
            for name in self._functions:
                if not self.connection.poll(max(0.0, end - time.monotonic())):
                    text = f"no value within reward.deadline ({deadline:g} s)"
                    return [*results, FunctionResult(name, "timed_out", text=text)], False
                results.append(self.connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            name = self._functions[len(results)]
            return [*results, FunctionResult(name, "crashed", text=f"its process ended: {self._how_it_ended()}")], False
        return results, True

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=END_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"what it has started has not ended for {END_TIMEOUT:g} s"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Ends the worker and all processes that it has started."""
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=END_TIMEOUT)
        self.process.kill()  # in case that took too long: the worker dies with this process, what it started may not
