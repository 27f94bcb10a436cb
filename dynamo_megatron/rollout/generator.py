"""Generating and scoring: the commands that the rollout process carries out for rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.arena import Arena
from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.evaluation.results import ProblemResult
from dynamo_megatron.records import NOT_TRAINED, Prompt, Rollout, plain_data
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.rollout.client import Response, open_session
from dynamo_megatron.rollout.dispatch import ExpectedLengths
from dynamo_megatron.rollout.endpoint import Endpoint
from dynamo_megatron.rollout.fleet import Fleet
from dynamo_megatron.rollout.result import (
    Accounted,
    PushNeeded,
    RolloutError,
    RolloutResult,
    ServerUse,
    group_id,
    rollout_id,
)
from dynamo_megatron.rollout.retention import Retention
from dynamo_megatron.rollout.reuse import UNSCORED, Reuse, reusable
from dynamo_megatron.rollout.sampling import Request, Sampling, tail_seconds
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.seeds import derived_seed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LISTED = 3  # prompts named in a note
UNSCORED_STEPS = 3  # in a row, of nothing else, end the run: such steps train nothing, and a service may restart


@dataclass
class _Call:
    """A call of `generate`. Where it ends for want of a server the next one goes on with it: outcomes are final."""

    wanted: dict[str, Prompt]
    version: int | None  # of the weights
    rollouts: dict[str, Accounted]
    notes: list[str]
    discarded: int  # rollouts of an interrupted run
    started: float = field(default_factory=time.monotonic)
    errors: list[str] = field(default_factory=list)
    unscored: dict[str, str] = field(default_factory=dict)  # status -> how the last reward of it failed
    finished: list[float] = field(default_factory=list)
    answered: dict[str, str] = field(default_factory=dict)  # rollout_id -> server
    late: int = 0
    arena: Arena = field(default_factory=Arena)  # of the batch

    def __post_init__(self) -> None:
        self.reused = len(self.rollouts)


class Generator:
    """Fleet, store and reward workers. What it opens goes on `stack`."""

    def __init__(
        self,
        config: Config,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        stack: contextlib.AsyncExitStack,
        decoder: Tokenizer | None = None,
    ):
        self._config, self._stack = config, stack
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._disk = ThreadPoolExecutor(1, "rollouts")  # the store's: it may block as long as a disk does
        self._ready: list[Rollout] = []  # to be written by the next one that holds `_writing`
        self._writing = asyncio.Lock()
        self._tokenizer = decoder  # None: loaded in `open`
        self._lengths = ExpectedLengths(config.rollout.max_new_tokens)
        self._begun: tuple[int, float] = (-1, 0.0)  # the step last asked for, and when it was first
        self._unscored_steps = 0  # in a row, up to the last one
        self._uses: dict[str, ServerUse] = {}  # since the last result: calls that ended for want of a server count
        self._cut: _Call | None = None  # the last call, where it ended for want of a server
        self._answered: dict[str, str] = {}  # of the last call: rollout_id -> server
        self.done = self.tokens = 0  # responses finished in the present command, and their tokens

    async def open(self) -> None:
        config = self._config
        self._store = RolloutStore(config.output_dir)
        self._retention = Retention(Path(config.output_dir), config.rollout.keep_last)
        self._stack.callback(self._store.close)
        self._stack.callback(self._disk.shutdown)  # before that: a line may be on its way
        session = await self._stack.enter_async_context(open_session())
        self._pool = RewardPool(config.reward)
        self._stack.callback(self._pool.close)
        await asyncio.to_thread(self._pool.start)  # before a server: a function that is not there shows in a second
        self._fleet = Fleet(config, session, self._eos_token_ids, self._vocab_size)
        self._fleet_run = asyncio.create_task(self._fleet.run())
        self._stack.push_async_callback(self._end_fleet)
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        await self._watched(self._fleet.wait_started())

    async def _end_fleet(self) -> None:
        self._fleet_run.cancel()
        await asyncio.wait([self._fleet_run])

    async def carry_out(self, command: str, arguments: tuple) -> Any:
        """What the method of this name returns. Raises RolloutError where nobody looks after the servers any more."""
        return await self._watched(getattr(self, command)(*arguments))

    async def _watched(self, work: Coroutine) -> Any:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._fleet_run}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            del task  # it holds what it raises, and by that this frame and the rollouts that came
        error = self._fleet_run.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise RolloutError(f"the rollout servers are no longer looked after: {error!r}") from error

    async def begin_push(self, version: int) -> list[Endpoint]:
        return await self._fleet.begin_push(version)

    async def end_push(self, version: int, outcomes: dict[Endpoint, str | None]) -> None:
        await self._fleet.end_push(version, outcomes)

    async def condemn(self, lost: dict[Endpoint, str]) -> None:
        for endpoint, why in lost.items():
            self._fleet.lost(endpoint, why)

    async def generate(self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int) -> RolloutResult:
        removed = []
        if self._begun[0] != step:
            self._begun = step, time.monotonic()
            removed = await self._on_disk(self._retention.trim, step)
        wanted = {
            rollout_id(group_id(step, position), k): prompt
            for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first)
            for k in range(n)
        }
        version = self._fleet.version
        call, self._cut = self._cut, None
        if call is None or (call.wanted, call.version) != (wanted, version):
            positions = range(first, first + len(prompts))
            reuse = await self._on_disk(self._reusable, step, wanted, positions)
            said = [f"step {step}: {note}" for note in reuse.notes(step_file(self._config.output_dir, step))]
            call = _Call(wanted, version, reuse.kept, said, len(reuse.discarded))
            reused = sum(r.batch.nbytes for r in reuse.kept.values() if r.batch is not None)
            await asyncio.to_thread(call.arena.grow, reused)
        rollouts, notes, self._answered = call.rollouts, call.notes, call.answered
        notes += [f"step {step}: {note}" for note in removed]
        self.done = len(rollouts)

        async def take(request: Request, response: Response, server: str) -> None:
            if response.error:
                call.errors.append(response.error)
            else:
                call.answered[request.name] = server
                self._lengths.observe(request.prompt_id, len(response.tokens))
            rollout, failure = await self._score(step, request.name, wanted[request.name], response, server)
            if failure:
                call.unscored[rollout.status] = failure
            await self._keep(rollout)
            rollouts[request.name] = accounted = Accounted.of(rollout)
            if accounted.batch is not None:
                call.arena.grow(accounted.batch.nbytes)
            self._finished(response)

        limit = self._config.rollout.step_deadline
        deadline = None if limit is None else self._begun[1] + limit
        requests = self._requests(wanted, rollouts)
        sampling = Sampling(self._fleet, self._config.rollout, requests, take, deadline)
        try:
            await sampling.run()
        except PushNeeded:
            self._cut = call
            raise
        finally:
            self._count(sampling.uses)
            call.finished += sampling.finished
            call.late += sampling.late
        if first == 0:  # a later round only refills: for want of time it ends no run
            self._check_share(step, call)
            self._check_rewards(step, call)
        happened, said = self._fleet.report()
        self._count(happened)
        uses, self._uses = self._uses, {}
        notes += [f"step {step}: {note}" for note in [*_notes(call), *said]]
        now = time.monotonic()
        times = {
            "generate": now - call.started,
            "reward_tail": now - max(call.finished, default=call.started),
            "tail": tail_seconds(call.finished),
        }
        return RolloutResult.of(
            {name: rollouts[name] for name in wanted},
            reused=call.reused,
            discarded=call.discarded,
            times=times,
            notes=notes,
            uses=uses,
            concatenate=call.arena.concatenate,
        )

    def _requests(self, wanted: dict[str, Prompt], there: Collection[str]) -> list[Request]:
        """Of what is wanted and not yet there, by rollout_id."""
        return [
            Request(
                name,
                name.rpartition("-")[0],
                prompt.prompt_id,
                prompt.tokens,
                self._lengths(prompt.prompt_id),
                derived_seed(self._config.seed, "rollout", name),
            )
            for name, prompt in wanted.items()
            if name not in there
        ]

    async def _keep(self, rollout: Rollout) -> None:
        """Until it is on disk. What gets ready during a write is written together by the next one."""
        self._ready.append(rollout)
        async with self._writing:
            ready, self._ready = self._ready, []
            if ready:
                await self._on_disk(self._store.append, *ready)

    async def _on_disk(self, work: Callable, *arguments: Any) -> Any:
        """What `work` returns, done after all that was asked for before. Servers are watched meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    def _count(self, uses: dict[str, ServerUse]) -> None:
        for server, use in uses.items():
            self._uses.setdefault(server, ServerUse()).add(use)

    def _check_share(self, step: int, call: _Call) -> None:
        """Raises RolloutError where the step's deadline came before enough rollouts did."""
        rollout, wanted = self._config.rollout, len(call.wanted)
        there = wanted - call.late
        if there < rollout.min_share * wanted:
            waited = ", ".join(sorted(name for name in self._uses if name)) or "a server"
            raise RolloutError(
                f"step {step}: {there} of {wanted} rollouts were there at rollout.step_deadline "
                f"({rollout.step_deadline:g} s), rollout.min_share asks for {rollout.min_share:g} of them; "
                f"waited for {waited}"
            )

    def _check_rewards(self, step: int, call: _Call) -> None:
        """Raises RewardError where all rewards of UNSCORED_STEPS steps in a row have failed."""
        statuses = {r.status for r in call.rollouts.values()} - set(NOT_TRAINED)
        self._unscored_steps = self._unscored_steps + 1 if statuses and statuses <= set(UNSCORED) else 0
        if self._unscored_steps == UNSCORED_STEPS:
            raise RewardError(
                f"step {step}: not one rollout of {UNSCORED_STEPS} steps in a row could be scored; the last failure: "
                f"{'; '.join(call.unscored.values())}"
            )

    async def reject(self, step: int, rollout_ids: Sequence[str]) -> None:
        """Of the last call; a server whose rollouts they are, for the most part, is restarted."""
        await self._on_disk(self._store.reject, step, rollout_ids)
        answered = self._answered
        whole, part = Counter(answered.values()), Counter(answered[name] for name in rollout_ids if name in answered)
        self._fleet.rejected({server: count / whole[server] for server, count in part.items()})

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
                derived_seed(self._config.seed, "eval", prompt.prompt_id, str(k)),
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
        failures = [score.failure for _, score, _ in outcomes.values() if score.failure]
        if failures and len(failures) == len(outcomes) - len(failed):
            raise RewardError(
                f"evaluation: not one of {len(failures)} responses could be scored; the last failure: {failures[-1]}"
            )
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
                    prompt=self._tokenizer.decode(prompt.tokens, skip_special_tokens=False),
                    answer=plain_data(prompt.answer),
                )
            )
        return results

    async def rescore(self, prompts: Sequence[Prompt], results: Sequence[ProblemResult]) -> list[ProblemResult]:
        async def scored(prompt: Prompt, result: ProblemResult) -> ProblemResult:
            scores = await asyncio.gather(*(self._pool.score(prompt, text) for text in result.responses))
            return dataclasses.replace(
                result,
                source=prompt.source,
                answer=plain_data(prompt.answer),
                rewards=[s.reward for s in scores],
                successes=[s.success for s in scores],
                statuses=[s.status for s in scores],
            )

        return await asyncio.gather(*(scored(p, r) for p, r in zip(prompts, results, strict=True)))

    def _finished(self, response: Response) -> None:
        self.done += 1
        self.tokens += len(response.tokens)

    async def _score(
        self, step: int, name: str, prompt: Prompt, response: Response, server: str
    ) -> tuple[Rollout, str]:
        """The rollout, and how its reward failed where it did."""
        failure = ""
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
            prompt=self._tokenizer.decode(prompt.tokens, skip_special_tokens=False),
            response="",
            answer=plain_data(prompt.answer),
        )
        if not response.error:
            rollout.response = text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
            score = await self._pool.score(prompt, text)
            rollout.reward, rollout.success = score.reward, score.success
            rollout.reward_parts, rollout.status, failure = score.parts, score.status, score.failure
        return rollout, failure

    def _reusable(self, step: int, wanted: dict[str, Prompt], positions: range) -> Reuse:
        """What an interrupted run left of these positions of the step. The file keeps nothing else of them."""
        version, longest = self._fleet.version or 0, self._config.rollout.max_new_tokens
        reuse = reusable(self._store.lines(step), wanted, positions, version, self._vocab_size, longest)
        if reuse.discarded:
            self._store.discard(step, reuse.discarded)
        return reuse


def _notes(call: _Call) -> list[str]:
    """What went wrong with rollouts of the call."""
    wanted, rollouts, notes = call.wanted, call.rollouts, []
    for status, failure in call.unscored.items():
        unscored = [p for name, p in wanted.items() if name in rollouts and rollouts[name].status == status]
        notes.append(
            f"{len(unscored)} of {len(wanted)} rollouts have reward 0 for a {status}, of {_listed(unscored)}; the "
            f"last: {failure}"
        )
    if call.errors:
        notes.append(f"{len(call.errors)} of {len(wanted)} rollouts failed; the first: {call.errors[0]}")
    return notes


def _listed(prompts: Sequence[Prompt]) -> str:
    """The first few of them, each once."""
    labels = list(dict.fromkeys(p.label for p in prompts))
    more = f" and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
    return f"prompt{'s' * (len(labels) > 1)} {', '.join(labels[:LISTED])}{more}"
