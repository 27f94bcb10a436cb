"""Generating and scoring: the commands that the rollout process carries out for rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Collection, Sequence

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.evaluation.results import ProblemResult
from dynamo_megatron.records import NOT_TRAINED, Prompt, Rollout
from dynamo_megatron.reward import RewardPool, Score
from dynamo_megatron.rollout.client import Response, open_session
from dynamo_megatron.rollout.dispatch import ExpectedLengths
from dynamo_megatron.rollout.endpoint import Endpoint
from dynamo_megatron.rollout.fleet import Fleet
from dynamo_megatron.rollout.result import (
    Accounted,
    RolloutError,
    RolloutResult,
    ServerUse,
    group_id,
    position_of,
    rollout_id,
)
from dynamo_megatron.rollout.sampling import Request, Sampling, tail_seconds
from dynamo_megatron.rollout.store import RolloutStore


class Generator:
    """Fleet, store and reward workers. What it opens goes on `stack`."""

    def __init__(self, config: Config, eos_token_ids: Sequence[int], stack: contextlib.AsyncExitStack):
        self._config, self._eos_token_ids, self._stack = config, eos_token_ids, stack
        self._lengths = ExpectedLengths(config.rollout.max_new_tokens)
        self._begun: tuple[int, float] = (-1, 0.0)  # the step last asked for, and when it was first
        self._uses: dict[str, ServerUse] = {}  # since the last result: calls that ended for want of a server count
        self.done = self.tokens = 0  # responses finished in the present command, and their tokens

    async def open(self) -> None:
        config = self._config
        self._store = RolloutStore(config.output_dir)
        self._stack.callback(self._store.close)
        session = await self._stack.enter_async_context(open_session())
        self._fleet = Fleet(config, session, self._eos_token_ids)
        self._fleet_run = asyncio.create_task(self._fleet.run())
        self._stack.push_async_callback(self._end_fleet)
        self._pool = RewardPool(config.reward)
        self._stack.callback(self._pool.close)
        await asyncio.to_thread(self._pool.start)
        self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        await self._fleet.wait_started()

    async def _end_fleet(self) -> None:
        self._fleet_run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._fleet_run

    async def begin_push(self, version: int) -> list[Endpoint]:
        if self._fleet_run.done():
            await self._fleet_run  # raises why nobody looks after the servers any more
        return await self._fleet.begin_push(version)

    async def end_push(self, version: int, outcomes: dict[str, str | None]) -> None:
        await self._fleet.end_push(version, outcomes)

    async def generate(self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int) -> RolloutResult:
        started = time.monotonic()
        if self._begun[0] != step:
            self._begun = step, started
        wanted = {
            rollout_id(group_id(step, position), k): prompt
            for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first)
            for k in range(n)
        }
        rollouts, notes = self._reusable(step, wanted, range(first, first + len(prompts)))
        reused = len(rollouts)
        errors: list[str] = []
        last_response = started
        self.done = reused

        async def take(request: Request, response: Response, server: str) -> None:
            nonlocal last_response
            last_response = time.monotonic()
            if response.error:
                errors.append(response.error)
            else:
                self._lengths.observe(request.prompt_id, len(response.tokens))
            rollout = await self._score(step, request.name, wanted[request.name], response, server)
            self._store.append(rollout)
            rollouts[request.name] = Accounted.of(rollout)
            self._finished(response)

        requests = [
            Request(name, name.rpartition("-")[0], p.prompt_id, p.tokens, self._lengths(p.prompt_id))
            for name, p in wanted.items()
            if name not in rollouts
        ]
        limit = self._config.rollout.step_deadline
        deadline = None if limit is None else self._begun[1] + limit
        sampling = Sampling(self._fleet, self._config.rollout, requests, take, deadline)
        try:
            await sampling.run()
        finally:
            self._count(sampling.uses)
        if deadline is not None and time.monotonic() >= deadline:
            self._check_share(step, rollouts.values(), sampling.uses)
        for status in ("reward_timeout", "reward_error"):
            if late := sum(r.status == status for r in rollouts.values()):
                notes.append(f"step {step}: {late} of {len(wanted)} rollouts have reward 0 for a {status}")
        if errors:
            notes.append(f"step {step}: {len(errors)} of {len(wanted)} rollouts failed; the first: {errors[0]}")
        happened, said = self._fleet.report()
        self._count(happened)
        uses, self._uses = self._uses, {}
        notes += [f"step {step}: {note}" for note in said]
        now = time.monotonic()
        times = {"generate": now - started, "reward_tail": now - last_response, "tail": tail_seconds(sampling.finished)}
        return RolloutResult.of(
            {name: rollouts[name] for name in wanted}, reused=reused, times=times, notes=notes, uses=uses
        )

    def _count(self, uses: dict[str, ServerUse]) -> None:
        for server, use in uses.items():
            self._uses.setdefault(server, ServerUse()).add(use)

    def _check_share(self, step: int, rollouts: Collection[Accounted], uses: dict[str, ServerUse]) -> None:
        """Raises RolloutError where the step's deadline came before enough rollouts did."""
        rollout = self._config.rollout
        there = sum(r.batch is not None for r in rollouts)
        if there < rollout.min_share * len(rollouts):
            waited = ", ".join(sorted(name for name in uses if name)) or "a server"
            raise RolloutError(
                f"step {step}: {there} of {len(rollouts)} rollouts were there at rollout.step_deadline "
                f"({rollout.step_deadline:g} s), rollout.min_share asks for {rollout.min_share:g} of them; "
                f"waited for {waited}"
            )

    async def reject(self, step: int, rollout_ids: Sequence[str]) -> None:
        named = set(rollout_ids)
        for rollout in self._store.finished(step):
            if rollout.rollout_id in named:
                self._store.append(dataclasses.replace(rollout, status="rejected"))

    async def evaluate(self, prompts: Sequence[Prompt]) -> list[ProblemResult]:
        config, samples = self._config.eval, self._config.eval.samples
        call = uuid.uuid4().hex[:8]
        outcomes: dict[str, tuple[Response, Score, str]] = {}
        by_group = {f"eval-{call}-{position}": prompt for position, prompt in enumerate(prompts)}

        async def take(request: Request, response: Response, server: str) -> None:
            text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            score = Score(0.0, False, status="failed")
            if not response.error:
                score = await self._pool.score(by_group[request.group], text)
            outcomes[request.name] = response, score, text
            self._finished(response)

        requests = [
            Request(
                f"{group}-{k}",
                group,
                prompt.prompt_id,
                prompt.tokens,
                self._lengths(prompt.prompt_id),
                config.temperature,
                config.max_new_tokens,
            )
            for group, prompt in by_group.items()
            for k in range(samples)
        ]
        await Sampling(self._fleet, self._config.rollout, requests, take).run()
        failed = [r.error for r, _, _ in outcomes.values() if r.error]
        if len(failed) == len(outcomes):
            raise RolloutError(f"evaluation: none of {len(outcomes)} responses came; the first: {failed[0]}")
        results = []
        for group, prompt in by_group.items():
            responses, scores, texts = zip(*(outcomes[f"{group}-{k}"] for k in range(samples)), strict=True)
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

    def _finished(self, response: Response) -> None:
        self.done += 1
        self.tokens += len(response.tokens)

    async def _score(self, step: int, name: str, prompt: Prompt, response: Response, server: str) -> Rollout:
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
            server=server,
        )
        if not response.error:
            text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            score = await self._pool.score(prompt, text)
            rollout.reward, rollout.success = score.reward, score.success
            rollout.reward_parts, rollout.status = score.parts, score.status
        return rollout

    def _reusable(
        self, step: int, wanted: dict[str, Prompt], positions: range
    ) -> tuple[dict[str, Accounted], list[str]]:
        """What an interrupted run, or a call that ended for want of a server, left of these positions of the step.

        The file keeps nothing else of them.
        """
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
            elif any(version != (self._fleet.version or 0) for version, _, _ in rollout.weight_versions):
                why["of another weight version"] += 1
            else:
                kept[rollout.rollout_id] = Accounted.of(rollout)
        reasons = [f"{count} {reason}" for reason, count in why.items() if count]
        if not reasons:
            return kept, []
        dropped = {r.rollout_id for r in here} - kept.keys()
        self._store.replace(step, [r for r in found if r.rollout_id not in dropped])
        return kept, [f"step {step}: discarded rollouts of an interrupted run: {', '.join(reasons)}"]
