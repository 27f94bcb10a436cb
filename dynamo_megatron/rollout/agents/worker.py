"""A process that runs agents: `PYTHON worker.py FD`, started by the pool.

It may run under another interpreter than the trainer's, so it imports only the standard library. From the socket FD it
receives a line of JSON with the function's name and answers {"ready": true} or {"failed": why}. Then each
{"run": id, "url": ..., "prompt": {...}} is answered, in any order, with {"ended": id, "reward": number or null} or
{"ended": id, "error": why}; {"cancel": id} cancels one. Every second {"alive": true} says that no agent blocks the
process. The process ends when the socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import numbers
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LINE_LIMIT = 1 << 28  # bytes
SHOWN = 500  # characters of an error
HEARTBEAT = 1.0  # seconds


class ChatError(RuntimeError):
    """The session refused a request; the message says why."""


class LimitReached(ChatError):
    """A limit of the episode refuses the request."""


@dataclass
class Prompt:
    """One problem of the data, with the fields of the trainer's Prompt that an agent needs. `messages` are ready to be
    sent."""

    prompt_id: str
    messages: list[dict[str, Any]]
    text: str | None = None
    answer: Any = None
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


class Session:
    """One episode. `base_url`: the URL of an OpenAI-compatible endpoint for clients, which accepts any key or none.
    `LimitReached`: the class of the exception, for agents that cannot import this module."""

    LimitReached = LimitReached

    def __init__(self, base_url: str):
        self.base_url = base_url

    async def chat(self, messages: list[dict], tools: list[dict] | None = None, **options: Any) -> dict[str, Any]:
        """Returns the assistant's message, which can be appended to `messages`. `options`: other fields of a request,
        such as stop and max_tokens. Raises ChatError, at a limit of the episode LimitReached."""
        request = {"messages": messages, **({"tools": tools} if tools else {}), **options}
        status, reply = await _post(f"{self.base_url}/chat/completions", request)
        if status != 200:
            error = reply["error"]
            raise (LimitReached if error.get("code") == "episode_limit" else ChatError)(error["message"])
        return reply["choices"][0]["message"]


async def _post(url: str, payload: dict[str, Any]) -> tuple[int, Any]:
    parts, body = urlsplit(url), json.dumps(payload).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=LINE_LIMIT)
    try:
        head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        text = (await reader.read()).decode(errors="replace")
        try:
            return status, json.loads(text)
        except ValueError:
            raise ChatError(f"status {status}, and no JSON: {text[:SHOWN]}") from None
    finally:
        writer.close()


def load(spec: str) -> Any:
    """Returns the function named by `spec`, "module:function". Raises whatever importing the user's module raises,
    and TypeError for what cannot be called with a prompt and a session."""
    module, _, name = spec.partition(":")
    sys.path.append(os.getcwd())  # last: a folder in the working directory must not replace an installed package
    if not callable(agent := getattr(importlib.import_module(module), name)):
        raise TypeError(f"it is {agent!r:.80}, not a function")
    with contextlib.suppress(ValueError):  # compiled functions may have no signature
        inspect.signature(agent, follow_wrapped=False).bind("prompt", "session")
    return agent


def shown(error: BaseException) -> str:
    """The error in a line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:SHOWN]
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


async def run(agent: Any, prompt: Prompt, session: Session) -> dict[str, Any]:
    """Runs one episode; returns the fields of its answer."""
    try:
        reward = await agent(prompt, session)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"error": shown(error)}
    if reward is None:
        return {"reward": None}
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return {"error": f"it returned {reward!r:.80}, neither None nor a finite number"}
    return {"reward": float(reward)}


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
    running: dict[str, asyncio.Task] = {}

    def answer(**fields: Any) -> None:
        writer.write(json.dumps(fields).encode() + b"\n")

    try:
        agent = load(json.loads(await reader.readline())["function"])
    except (Exception, SystemExit) as error:  # the user's module may raise anything while it is imported
        answer(failed=" ".join(f"{type(error).__name__}: {error}".split())[:SHOWN])
        await writer.drain()
        return
    answer(ready=True)

    async def beat() -> None:
        while True:
            answer(alive=True)
            await asyncio.sleep(HEARTBEAT)

    beating = asyncio.create_task(beat())  # the variable keeps it alive; the end of the process ends it

    async def episode(name: str, prompt: Prompt, session: Session) -> None:
        found: dict[str, Any] = {"error": "it was cancelled"}
        try:
            found = await run(agent, prompt, session)
        finally:
            del running[name]
            answer(ended=name, **found)

    while line := await reader.readline():
        asked = json.loads(line)
        if "cancel" in asked and asked["cancel"] in running:
            running[asked["cancel"]].cancel()
        elif "run" in asked:
            work = episode(asked["run"], Prompt(**asked["prompt"]), Session(asked["url"]))
            running[asked["run"]] = asyncio.create_task(work)
    beating.cancel()


def main(descriptor: int) -> None:
    del sys.path[0]  # the folder of this file: an agent must not import its modules
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # these are for the trainer's ranks
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    os.set_inheritable(descriptor, False)  # what an agent starts must not keep the socket open
    asyncio.run(serve(socket.socket(fileno=descriptor)))  # its end cancels what is left


if __name__ == "__main__":
    main(int(sys.argv[1]))
