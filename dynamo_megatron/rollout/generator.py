"""Generating and scoring: the commands that the rollout process carries out for rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.evaluation.results import ProblemResult
from dynamo_megatron.records import NOT_TRAINED, Prompt, Rollout
from dynamo_megatron.reward import RewardPool, Score
from dynamo_megatron.rollout.client import Response, SGLangClient
from dynamo_megatron.rollout.endpoint import Endpoint
from dynamo_megatron.rollout.result import RolloutError, RolloutResult, group_id, position_of, rollout_id
from dynamo_megatron.rollout.server import SGLangServer
from dynamo_megatron.rollout.store import RolloutStore


class Generator:
    """Server, client, store and reward workers. What it opens goes on `stack`.

    `server_url`: a server that runs already; None: one of our own.
    """

    def __init__(
        self,
        config: Config,
        eos_token_ids: Sequence[int],
        server_url: str | None,
        stack: contextlib.AsyncExitStack,
    ):
        self._config, self._eos_token_ids, self._stack = config, eos_token_ids, stack
        self._server_url, self._server = server_url, None
        self._version = 0
        self.done = self.tokens = 0  # responses finished in the present command, and their tokens

    async def open(self) -> None:
        config = self._config
        self._store = RolloutStore(config.output_dir)
        self._stack.callback(self._store.close)
        if self._server_url is None:
            log = Path(config.output_dir) / "logs" / "sglang.log"
            self._server = SGLangServer(config.rollout, config.model, log)
            self._stack.callback(self._server.stop)
            self._server.start()
        self._pool = RewardPool(config.reward)
        self._stack.callback(self._pool.close)
        await asyncio.to_thread(self._pool.start)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        if self._server is not None:
            await self._server.wait_ready()
        url = self._server.url if self._server is not None else self._server_url
        client = SGLangClient(url, config.rollout, self._eos_token_ids)
        self._client = await self._stack.enter_async_context(client)
        await self._client.check()

    async def update_weights(self, folder: str, version: int) -> float:
        started = time.monotonic()
        await self._client.update_weights(folder, version)
        self._version = version
        return time.monotonic() - started

    async def begin_push(self, version: int) -> list[Endpoint]:
        await self._client.rest()
        return [Endpoint("server-0", 1, self._client.url, self._config.rollout.tp, "")]

    async def end_push(self, version: int, outcomes: dict[str, str | None]) -> None:
        if outcomes["server-0"] is not None:
            raise RolloutError(f"no server took weight version {version}; server-0: {outcomes['server-0']}")
        self._version = version

    async def generate(self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int) -> RolloutResult:
        started = time.monotonic()
        wanted = {
            rollout_id(group_id(step, position), k): prompt
            for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first)
            for k in range(n)
        }
        rollouts, notes = self._reusable(step, wanted, range(first, first + len(prompts)))
        reused = len(rollouts)
        errors: list[str] = []
        self._last_response, self.done = time.monotonic(), reused
        await self._all(
            self._rollout(step, name, prompt, rollouts, errors)
            for name, prompt in wanted.items()
            if name not in rollouts
        )
        for status in ("reward_timeout", "reward_error"):
            if late := sum(r.status == status for r in rollouts.values()):
                notes.append(f"step {step}: {late} of {len(wanted)} rollouts have reward 0 for a {status}")
        if errors:
            notes.append(f"step {step}: {len(errors)} of {len(wanted)} rollouts failed; the first: {errors[0]}")
        now = time.monotonic()
        times = {"generate": now - started, "reward_tail": now - self._last_response}
        return RolloutResult.of([rollouts[name] for name in wanted], reused=reused, times=times, notes=notes)

    async def reject(self, step: int, rollout_ids: Sequence[str]) -> None:
        named = set(rollout_ids)
        for rollout in self._store.finished(step):
            if rollout.rollout_id in named:
                self._store.append(dataclasses.replace(rollout, status="rejected"))

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[ProblemResult]:
        samples = self._config.eval.samples
        outcomes: dict[tuple[int, int], tuple[Response, Score, str]] = {}
        await self._all(
            self._sample(position, k, prompt, outcomes)
            for position, prompt in enumerate(prompts)
            for k in range(samples)
        )
        failed = [r.error for r, _, _ in outcomes.values() if r.error]
        if len(failed) == len(outcomes):
            raise RolloutError(f"evaluation: none of {len(outcomes)} responses came; the first: {failed[0]}")
        results = []
        for position, prompt in enumerate(prompts):
            responses, scores, texts = zip(*(outcomes[position, k] for k in range(samples)), strict=True)
            results.append(
                ProblemResult(
                    prompt_id=prompt.prompt_id,
                    source=prompt.source,
                    rewards=[s.reward for s in scores],
                    successes=[s.success for s in scores],
                    lengths=[len(r.tokens) for r in responses],
                    finish_reasons=[r.finish_reason for r in responses],
                    statuses=[s.status for s in scores],
                    responses=list(texts),
                )
            )
        return results

    async def _sample(self, position: int, k: int, prompt: Prompt, outcomes: dict) -> None:
        config = self._config.eval
        name = f"eval-{uuid.uuid4().hex[:8]}-{position}-{k}"
        response = await self._client.generate(
            name, prompt.tokens, temperature=config.temperature, max_new_tokens=config.max_new_tokens
        )
        text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
        score = Score(0.0, False, status="failed")
        if not response.error:
            score = await self._pool.score(prompt, text)
        outcomes[position, k] = response, score, text
        self._finished(response)

    def _finished(self, response: Response) -> None:
        self.done += 1
        self.tokens += len(response.tokens)

    async def _all(self, work: Iterable[Coroutine]) -> None:
        """Runs all of it at once; the first failure ends the rest and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for one in work:
                    group.create_task(one)
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if isinstance(first, RolloutError) and self._server is not None:
                await asyncio.sleep(1.0)  # a dead server says more than the connections that broke with it
                self._server.check()
            raise first from None

    async def _rollout(
        self, step: int, name: str, prompt: Prompt, rollouts: dict[str, Rollout], errors: list[str]
    ) -> None:
        response = await self._client.generate(name, prompt.tokens)
        self._last_response = time.monotonic()
        rollout = Rollout(
            rollout_id=name,
            group_id=name.rpartition("-")[0],
            prompt_id=prompt.prompt_id,
            step=step,
            tokens=prompt.tokens + response.tokens,
            response_mask=[0] * len(prompt.tokens) + [1] * len(response.tokens),
            engine_logprobs=response.logprobs,
            weight_versions=response.weight_versions,
            finish_reason=response.finish_reason,
            reward=0.0,
            success=False,
            reward_parts={},
            status="failed",
        )
        if response.error:
            errors.append(response.error)
        else:
            text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            score = await self._pool.score(prompt, text)
            rollout.reward, rollout.success = score.reward, score.success
            rollout.reward_parts, rollout.status = score.parts, score.status
        self._store.append(rollout)
        rollouts[name] = rollout
        self._finished(response)

    def _reusable(self, step: int, wanted: dict[str, Prompt], positions: range) -> tuple[dict[str, Rollout], list[str]]:
        """What an interrupted run left of these positions of the step; the file keeps nothing else of them."""
        found = self._store.finished(step)
        here = [r for r in found if position_of(r.group_id) in positions]
        kept, why = {}, {"failed": 0, "rejected": 0, "of another prompt": 0, "of another weight version": 0}
        for rollout in here:
            prompt = wanted.get(rollout.rollout_id)
            if rollout.status in NOT_TRAINED:
                why[rollout.status] += 1
            elif (
                prompt is None
                or rollout.prompt_id != prompt.prompt_id
                or rollout.tokens[: rollout.response_mask.count(0)] != prompt.tokens
            ):
                why["of another prompt"] += 1
            elif any(version != self._version for version, _, _ in rollout.weight_versions):
                why["of another weight version"] += 1
            else:
                kept[rollout.rollout_id] = rollout
        reasons = [f"{count} {reason}" for reason, count in why.items() if count]
        if not reasons:
            return kept, []
        dropped = {r.rollout_id for r in here} - kept.keys()
        self._store.replace(step, [r for r in found if r.rollout_id not in dropped])
        return kept, [f"step {step}: discarded rollouts of an interrupted run: {', '.join(reasons)}"]
