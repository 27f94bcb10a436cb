"""Reward functions run in worker processes or behind HTTP, with a deadline that stops even C code."""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_megatron.config import RewardConfig
from dynamo_megatron.config.reward import URLS
from dynamo_megatron.errors import InputError
from dynamo_megatron.reward.functions import SERVICES, FunctionResult, RewardError, Step
from dynamo_megatron.reward.workers import Workers
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import LARGEST_REWARD, Prompt

if TYPE_CHECKING:
    from dynamo_megatron.reward.http import Addresses, HttpReward
    from dynamo_megatron.reward.ray_workers import RayWorkers

REQUESTS = 8  # to one URL, under way at once
SHOWN = 300  # characters of a problem, an answer or a response in a message
FUSIONS = {"sum": math.fsum, "mean": lambda values: math.fsum(values) / len(values), "product": math.prod}


@dataclass(frozen=True)
class Score:
    """`status` is "ok", "reward_timeout" or "reward_error". `parts` has the value of each function that gave one, and
    `failures` the state of each that gave none (`types.REWARD_STATES`). `failure` says in one line which function
    failed first, and how. `steps` is empty unless all functions gave a value."""

    reward: float
    success: bool
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    failure: str = field(default="", compare=False)
    failures: dict[str, str] = field(default_factory=dict, compare=False)
    steps: list[Step] = field(default_factory=list)


class RewardPool:
    """Scores responses with worker processes (`Workers`, or with `placement: ray` `RayWorkers`) and with services:
    URLs, `judge` and `reward_model`.

    A sample that is late gets reward 0 and status "reward_timeout". Where a function or service fails, `score` raises
    RewardError, or the sample gets reward 0 and status "reward_error" (`config.on_error`). `prime` is not computed here
    but by the ranks (`Policy.implicit_rewards`). May be used from any event loop and thread.
    """

    def __init__(self, config: RewardConfig, servers: Addresses | None = None) -> None:
        """`servers`: the addresses of the servers of `config.servers`, which the caller starts and stops."""
        self._config, self._servers = config, servers
        self._local = [name for name in config.outcomes if not name.startswith(URLS) and name not in SERVICES]
        self._services: list[HttpReward] = []
        self._workers: Workers | RayWorkers | None = None
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
                self._workers = self._placed()
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
        """Stops all workers and requests now; samples under way are lost. May be called twice."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()
        for service in self._services:
            service.close()

    def _placed(self) -> Workers | RayWorkers:
        if self._config.placement == "local":
            return Workers(self._local, self._config)
        try:
            from dynamo_megatron.reward.ray_workers import RayWorkers
        except ModuleNotFoundError as error:
            lacks = f"this interpreter has no {error.name}"
            raise InputError(f"reward.placement: ray: {lacks}; pip install 'dynamo-megatron[ray]'") from None
        return RayWorkers(self._local, self._config)

    def _service(self, name: str) -> HttpReward:
        # Not at the top: the workers import this file too, and aiohttp would slow their start.
        from dynamo_megatron.reward.http import Address, Addresses, HttpReward
        from dynamo_megatron.reward.services import Judge, RewardModel, UrlService

        config = self._config
        common = {"deadline": config.deadline, "cached": config.cache}
        if name not in SERVICES:
            key = key_of(config.api_key_env, "reward.api_key_env")
            return HttpReward(UrlService(name), Addresses([Address(name, key)]), concurrency=REQUESTS, **common)
        section = config.judge if name == "judge" else config.reward_model
        common |= {"concurrency": section.concurrency, "per_second": section.requests_per_second}
        key = key_of(section.api_key_env, f"reward.{name}.api_key_env")
        if name == "judge":
            return HttpReward(Judge(section), Addresses([Address(section.url.rstrip("/"), key)]), **common)
        given = Addresses(Address(url.rstrip("/"), key) for url in section.urls)
        return HttpReward(RewardModel(section), self._servers or given, **common)

    def _combined(self, prompt: Prompt, response: str, results: list[FunctionResult]) -> Score:
        by_name = {result.function: result for result in results}
        scored = [by_name[n] for n in self._config.outcomes if n in by_name and by_name[n].state == "scored"]
        parts = {result.function: result.value for result in scored}
        failures = {result.function: result.state for result in results if result.state != "scored"}
        late = next((result for result in results if result.state == "timed_out"), None)
        failed = next((result for result in results if result.state in ("wrong_format", "crashed")), None)
        if failed is None and late is None:
            reward = FUSIONS[self._config.fusion](list(parts.values()))
            if abs(reward) <= LARGEST_REWARD:
                success = parts[self._config.outcomes[0]] >= self._config.success_threshold
                steps = [step for result in scored for step in result.steps]
                return Score(reward, success, parts, steps=steps)
            text = f"their {self._config.fusion} is {reward:g}, of more than {LARGEST_REWARD:g} in size"
            failed = FunctionResult(", ".join(parts), "wrong_format", text=text)
        if failed is not None and self._config.on_error == "raise":
            raise RewardError(_failure(prompt, response, failed))
        status, first = ("reward_error", failed) if failed is not None else ("reward_timeout", late)
        return Score(0.0, False, parts, status, f"{first.function}: {first.text}", failures)


def key_of(variable: str | None, key: str) -> str:
    """The value of the environment variable `variable`, which the configuration's `key` names; "" where `variable` is
    None. Raises InputError where it is not set, or has a control character."""
    secret = "" if variable is None else os.environ.get(variable, "")
    if variable is not None and (not secret or not secret.isprintable()):  # mostly a line break at the end
        raise InputError(f"{key}: the environment variable {variable} is not set, or has a line break")
    return secret


def _failure(prompt: Prompt, response: str, failed: FunctionResult) -> str:
    problem = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
    lines = [
        *([failed.frames] if failed.frames else []),
        f"prompt {prompt.label}: {on_one_line(problem, SHOWN)!r}, answer {on_one_line(repr(prompt.answer), SHOWN)}",
        f"response of {len(response)} characters: {on_one_line(response, SHOWN)!r}",
        f"reward function {failed.function} failed on prompt {prompt.label}: {failed.text}",
    ]
    return "\n".join(lines)
