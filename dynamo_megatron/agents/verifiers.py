"""An agent made from an environment of the `verifiers` library (its v1 interface; docs/agents.md).

    PYTHON -m dynamo_megatron.agents.verifiers ENVIRONMENT OUT    writes the environment's tasks as rows of data.source

It runs under `rollout.agent_python`, and imports the standard library, verifiers, and aiohttp, which verifiers needs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web

LARGEST = 1 << 28  # bytes of a request
TRACE = "X-Session-ID"  # the header in which verifiers names the trace of a request


def verifiers_agent(environment: dict[str, Any]) -> Callable[[Any, Any], Awaitable[float]]:
    """The agent for `rollout.agent`: each episode is one of the environment, whose rubric gives the reward.

    `environment`: verifiers' configuration of it: `taskset`, the seats' `harness` and `runtime`, and so on. A seat
    without a `model` and a `client` of its own plays with the policy; an episode has one run of such a seat."""
    return _Environment(environment).episode


class _Environment:
    """The environment of this process, and a server that passes its requests on to the sessions of the episodes: from a
    session's own URL verifiers would make a client for each episode, and keep all of them."""

    def __init__(self, config: dict[str, Any]):
        self._env = vf.load_environment(vf.resolve_env_config(config))
        self._unread, self._tasks = iter(self._env.taskset), list[vf.Task]()
        self._urls: dict[str, str] = {}  # of sessions, by the id of a trace
        self._opened: asyncio.Future[vf.ModelContext] | None = None

    async def episode(self, prompt: Any, session: Any) -> float:
        """The reward of the row `prompt` in the `session`. Raises RuntimeError where there is none."""
        task = self._task(prompt)
        if self._opened is None:
            self._opened = asyncio.ensure_future(self._open())
        context = await asyncio.shield(self._opened)
        begun: list[str] = []

        def begin(trace: vf.Trace) -> None:
            begun.append(trace.id)
            self._urls[trace.id] = session.base_url

        try:
            episode = await self._env.run_episode(task, context, on_trace=begin)
        finally:
            for trace_id in begun:
                del self._urls[trace_id]
        if not episode.ok:
            errors = [*itertools.chain.from_iterable(trace.errors for trace in episode.traces), *episode.errors]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "verifiers gives no reason"
            raise RuntimeError(f"the environment's episode failed: {why}")
        played = [trace for trace in episode.traces if trace.agent.config.client == context.client]
        if len(played) != 1:
            raise RuntimeError(
                f"{len(played)} runs of the environment's episode played with the policy, and one reward cannot be "
                "that of all; give the other seats a model and a client"
            )
        return played[0].reward

    def _task(self, prompt: Any) -> vf.Task:
        number = prompt.meta["task"]
        self._tasks += itertools.islice(self._unread, max(0, number + 1 - len(self._tasks)))
        if number >= len(self._tasks) or self._tasks[number].key != prompt.prompt_id:
            raise RuntimeError(f"the environment's task {number} is not that of the row; write the rows anew")
        return self._tasks[number]

    async def _open(self) -> vf.ModelContext:
        """Serves for as long as the process lives."""
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),  # rollout.timeout ends an episode, and with it its requests
            connector=aiohttp.TCPConnector(limit=0),
        )
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/v1/{route:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._serving = self._env.serving()
        await self._serving.__aenter__()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return vf.ModelContext("policy", vf.EvalClientConfig(base_url=url, api_key_var="NONE_NEEDED"))

    async def _pass_on(self, request: web.Request) -> web.Response:
        if (url := self._urls.get(request.headers.get(TRACE, ""))) is None:
            return web.json_response({"error": {"message": "the episode has ended"}}, status=404)
        body, headers = await request.read(), {"Content-Type": "application/json"}
        async with self._http.post(f"{url}/{request.match_info['route']}", data=body, headers=headers) as reply:
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the tasks of a verifiers environment as rows of data.source.")
    parser.add_argument("environment", type=json.loads, help="as verifiers_agent's, in JSON")
    parser.add_argument("out", type=Path, help="file.jsonl")
    parser.add_argument("--limit", type=int, help="tasks; an endless taskset needs it")
    options = parser.parse_args()
    taskset = vf.load_taskset(vf.resolve_env_config(options.environment).taskset)
    if taskset.INFINITE and options.limit is None:
        parser.error("the taskset is endless; give --limit")
    with open(options.out, "w", encoding="utf-8") as file:
        for number, task in enumerate(itertools.islice(taskset, options.limit)):
            shown = task.data.prompt_text or task.data.name or task.key
            file.write(json.dumps({"id": task.key, "problem": shown, "answer": None, "task": number}) + "\n")


if __name__ == "__main__":
    main()
