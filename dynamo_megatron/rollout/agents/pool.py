"""The processes that run agents. Each can be killed at any time, with everything that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import guard
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.user_code import SPEC
from dynamo_megatron.types import LARGEST_REWARD

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT = 120.0  # seconds; imports from a busy network file system take long
REACT_WITHIN = 5.0  # seconds for an agent to stop once it is cancelled
SILENT_WITHIN = 30  # seconds without a sign of life (worker.HEARTBEAT) until a process counts as blocked by an agent
ALONE_AT_ONCE = 8  # processes of one episode each; a process that ends may leave many episodes to start again
LINE_LIMIT = 1 << 28  # bytes


class AgentFailed(Exception):
    """The agent raised an exception or returned an invalid reward. The message is one line."""


class AgentLost(Exception):
    """The process of the agent ended, or was killed because an agent blocked it or did not stop. One line."""


class AgentPool:
    """`workers` processes of the interpreter `python` (None: this one), each of which runs many episodes of the agent
    `function` ("module:function") at a time. A process is killed and replaced if an agent does not stop when it is
    cancelled, or blocks it for SILENT_WITHIN seconds."""

    def __init__(self, function: str, python: str | None, workers: int):
        if not SPEC.fullmatch(function):
            raise InputError(f"rollout.agent: {function!r} is not of the form module:function")
        self._function, self._python, self._count = function, shutil.which(python or sys.executable), workers
        if self._python is None:
            raise InputError(f"rollout.agent_python: there is no program {python!r}; name an interpreter")
        self._workers: list[Worker] = []
        self._alone: set[Worker] = set()
        self._free_alone = asyncio.Semaphore(ALONE_AT_ONCE)

    async def start(self) -> None:
        """Waits until all processes are ready. Raises InputError where the function cannot be loaded or the interpreter
        does not start."""
        self._workers = [Worker(self._function, self._python) for _ in range(self._count)]
        await asyncio.gather(*(worker.ready for worker in self._workers))

    @contextlib.asynccontextmanager
    async def own_process(self) -> AsyncIterator[Worker]:
        """A process for one episode, which ends with the context. An episode whose process ended may be the one that
        ends it: among others it would take these with it again. Waits while ALONE_AT_ONCE of them are in use."""
        async with self._free_alone:
            worker = Worker(self._function, self._python)
            self._alone.add(worker)
            try:
                yield worker
            finally:
                self._alone.discard(worker)
                await worker.close("its episode ended")

    async def run(
        self, name: str, prompt: dict[str, Any], url: str, until: float, worker: Worker | None = None
    ) -> float | None:
        """Runs an episode; returns the reward that the agent returned. `name`: unique among the episodes under way.
        `until`: monotonic seconds. `worker`: of `own_process`; None: the one with the fewest episodes.

        Raises AgentFailed, AgentLost, and TimeoutError at `until`. If this call is cancelled, it stops the agent first.
        """
        answer = await (worker or self._least()).run(name, prompt, url, until)
        if "error" in answer:
            raise AgentFailed(on_one_line(str(answer["error"]), 1000))
        reward = answer["reward"]
        if reward is not None and abs(reward) > LARGEST_REWARD:
            raise AgentFailed(f"it returned {reward:g}, of more than {LARGEST_REWARD:g} in size")
        return reward

    async def close(self) -> None:
        """Ends all processes now."""
        workers, self._workers = [*self._workers, *self._alone], []
        await asyncio.gather(*(worker.close("the pool was closed") for worker in workers))

    def _least(self) -> Worker:
        """Returns the worker with the fewest agents. If its process has ended, the worker is replaced first."""
        worker = min(self._workers, key=lambda w: len(w.running))
        if worker.has_ended:
            worker.closing, place = asyncio.create_task(worker.close("")), self._workers.index(worker)
            self._workers[place] = worker = Worker(self._function, self._python)
        return worker


class Worker:
    """One of the processes."""

    def __init__(self, function: str, python: str):
        self._function = function
        self.running: dict[str, asyncio.Future] = {}  # by the episode's name
        self.has_ended = False
        self.closing: asyncio.Task | None = None
        self._silent = 0  # seconds
        ours, theirs = socket.socketpair()
        with theirs:
            # A client of the session at 127.0.0.1 would else ask the node's proxy.
            exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
            exempt = exempt if exempt.strip() == "*" else f"{exempt},127.0.0.1".lstrip(",")
            environment = os.environ | {"no_proxy": exempt, "NO_PROXY": exempt}
            command = [python, str(WORKER), str(theirs.fileno())]
            self._process = guard.guarded(command, env=environment, pass_fds=[theirs.fileno()])
        self._socket, self._writer = ours, None
        self.ready = asyncio.create_task(self._open())
        self._listening: asyncio.Task | None = None
        self._watching: asyncio.Task | None = None

    async def _open(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=LINE_LIMIT)
        self._send(function=self._function)
        try:
            async with asyncio.timeout(START_TIMEOUT):
                answer = json.loads(await reader.readline() or "null")
        except TimeoutError:
            raise InputError(
                f"rollout.agent: waited {START_TIMEOUT:g} s for a process to import {self._function}"
            ) from None
        if answer is None or "failed" in answer:
            why = "its process ended" if answer is None else on_one_line(str(answer["failed"]), 1000)
            raise InputError(f"rollout.agent: cannot load {self._function}: {why}")
        self._listening = asyncio.create_task(self._listen(reader))
        self._watching = asyncio.create_task(self._watch())

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer, self._silent = json.loads(line), 0
                if "ended" not in answer:  # a sign of life
                    continue
                if (ended := self.running.pop(answer["ended"], None)) is not None and not ended.done():
                    ended.set_result(answer)
        self._lose("its process ended")

    async def _watch(self) -> None:
        """Counts seconds that this process has waited, so that a time in which it was blocked itself is no silence."""
        while self._silent < SILENT_WITHIN:
            await asyncio.sleep(1)
            self._silent += 1
        self._kill(f"an agent blocked its process for {SILENT_WITHIN} s")

    def _kill(self, why: str) -> None:
        self._lose(why)
        self._process.stdin.close()

    def _lose(self, why: str) -> None:
        self.has_ended = True
        for ended in self.running.values():
            if not ended.done():
                ended.set_exception(AgentLost(why))
        self.running.clear()

    async def run(self, name: str, prompt: dict[str, Any], url: str, until: float) -> dict[str, Any]:
        """The agent's answer. Arguments and errors as AgentPool.run's. Where an agent that is cancelled does not stop
        within REACT_WITHIN seconds, the process is killed."""
        ended = self.running[name] = asyncio.get_running_loop().create_future()
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody awaits it any more
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await asyncio.wait([self.ready])
                if self.has_ended or self.ready.cancelled() or self.ready.exception() is not None:
                    self._lose("its process did not start again")
                self._send(run=name, url=url, prompt=prompt)
                return await asyncio.shield(ended)
        except (TimeoutError, asyncio.CancelledError):
            self._send(cancel=name)
            await asyncio.wait([ended], timeout=REACT_WITHIN)
            if not ended.done():
                self._kill(f"the agent of {name} did not end within {REACT_WITHIN:g} s")
            raise

    def _send(self, **fields: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(fields).encode() + b"\n")

    async def close(self, why: str) -> None:
        """Ends the process and all that it has started."""
        self._lose(why)
        await asyncio.to_thread(guard.end, self._process, 5)
        for task in (self.ready, self._listening, self._watching):
            if task is not None:
                task.cancel()
        if self._writer is not None:
            self._writer.close()


async def check_agent(function: str, python: str | None) -> None:
    """Starts a process of the agent, and ends it. Raises InputError as `AgentPool` and its `start` do."""
    pool = AgentPool(function, python, 1)
    try:
        await pool.start()
    finally:
        await pool.close()
