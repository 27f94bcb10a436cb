"""An agent made from an environment of the `verifiers` library (its v1 interface; docs/agents.md).

    PYTHON -m dynamo_megatron.agents.verifiers CONFIG OUT    the rows of `data.source`, from the environment's tasks

It runs under `rollout.agent_python`, and imports the standard library, verifiers, and aiohttp, which verifiers needs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web

LARGEST = 1 << 28  # bytes of a request
SESSION_HEADER = "X-Session-ID"  # verifiers names the trace in it with every request
log = logging.getLogger(__name__)


def verifiers_agent(environment: dict[str, Any]) -> Callable[[Any, Any], Awaitable[float]]:
    """The agent for `rollout.agent`: each episode is one of the environment, and its rubric gives the reward.

    `environment`: verifiers' configuration of it (`taskset`, the seat's `harness` and `runtime`, and so on). Seats
    without a `model` and `client` of their own play with the policy; an episode may have one such run.
    """
    served = _Environment(environment)

    async def agent(prompt: Any, session: Any) -> float:
        return await served.episode(prompt, session.base_url)

    return agent


class _Environment:
    """One for the process: the environment, and a server between it and the sessions of all episodes. With the session's
    own URL instead, verifiers would make, and keep, a client for each episode."""

    def __init__(self, config: dict[str, Any]):
        self._env = vf.load_environment(vf.resolve_env_config(config))
        self._source: Iterator[vf.Task] = iter(self._env.taskset)
        self._tasks: list[vf.Task] = []
        self._sessions: dict[str, str] = {}  # URL by the id of a trace
        self._opening: asyncio.Future[vf.ModelContext] | None = None

    async def episode(self, prompt: Any, url: str) -> float:
        """Raises RuntimeError where the episode has no reward."""
        task = self._task(prompt)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        context = await asyncio.shield(self._opening)
        seats: list[vf.Trace] = []

        def begin(trace: vf.Trace) -> None:
            seats.append(trace)
            self._sessions[trace.id] = url

        try:
            episode = await self._env.run_episode(task, context, on_trace=begin)
        finally:
            for trace in seats:
                del self._sessions[trace.id]
        if not episode.ok:
            errors = [*episode.errors, *itertools.chain.from_iterable(t.errors for t in episode.traces)]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it gave no reason"
            raise RuntimeError(f"verifiers: the episode failed: {why}")
        played = [trace for trace in episode.traces if trace.agent.config.client == context.client]
        if len(played) != 1:
            raise RuntimeError(
                f"verifiers: {len(played)} runs of the episode played with the policy, and one reward cannot be theirs; "
                "give the other seats a model and a client of their own"
            )
        return played[0].reward

    def _task(self, prompt: Any) -> vf.Task:
        number = prompt.meta["task"]
        while len(self._tasks) <= number:
            self._tasks.append(next(self._source))
        task = self._tasks[number]
        if task.key != prompt.prompt_id:
            raise RuntimeError(f"verifiers: task {number} is another one than when the rows were written; write them anew")
        return task

    async def _open(self) -> vf.ModelContext:
        """Serves for as long as the process lives."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/v1/{route:.*}", self._relay)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await self._env.serving().__aenter__()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return vf.ModelContext("policy", vf.EvalClientConfig(base_url=url, api_key_var="ANY"))

    async def _relay(self, request: web.Request) -> web.Response:
        base = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if base is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=404)
        url, headers = f"{base}/{request.match_info['route']}", {"Content-Type": "application/json"}
        async with self._http.post(url, data=await request.read(), headers=headers) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tasks of a verifiers environment as rows of data.source.")
    parser.add_argument("environment", type=json.loads, help="as for verifiers_agent, in JSON")
    parser.add_argument("out", type=Path, help="file.jsonl")
    parser.add_argument("--limit", type=int, help="tasks; an endless taskset needs it")
    options = parser.parse_args()
    taskset = vf.load_environment(vf.resolve_env_config(options.environment)).taskset
    if options.limit is None and taskset.INFINITE:
        parser.error("the taskset is endless: give --limit")
    with open(options.out, "w", encoding="utf-8") as file:
        for number, task in enumerate(itertools.islice(taskset, options.limit)):
            shown = task.data.prompt_text or task.data.name or task.key
            file.write(json.dumps({"id": task.key, "problem": shown, "answer": None, "task": number}) + "\n")


if __name__ == "__main__":
    main()
