"""Generating and scoring: the commands that the rollout process carries out for rank 0."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import load_tokenizer, template_variables
from dynamo_megatron.models import load_model_config
from dynamo_megatron.reward import RewardError, RewardPool
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episodes import Agents
from dynamo_megatron.rollout.client import Response, open_session
from dynamo_megatron.rollout.dispatch import Request
from dynamo_megatron.rollout.result import RolloutError, RolloutResult, group_id
from dynamo_megatron.rollout.retention import Retention
from dynamo_megatron.rollout.sampling import Sampling
from dynamo_megatron.rollout.scoring import Evaluated, Scoring, check_evaluation, evaluation_requests, problem_result
from dynamo_megatron.rollout.servers.fleet import Fleet
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.rollout.step_session import StepSession, wanted_rollouts
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.runtime.process_signals import give_back_freed_memory
from dynamo_megatron.runtime.routes import RouteShape
from dynamo_megatron.runtime.threads import first_error
from dynamo_megatron.types import ProblemResult, Prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNSCORED_STEPS = 3  # steps in a row without one scored rollout end the run; a service may restart in fewer


class Generator:
    """Owns the fleet, the store and the reward workers. `stack` closes what it opens."""

    def __init__(
        self,
        config: Config,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        stack: contextlib.AsyncExitStack,
        decoder: Tokenizer | None = None,
        routes: RouteShape | None = None,
    ):
        self._config, self._stack, self._routes = config, stack, routes
        self._eos_token_ids, self._vocab_size = list(eos_token_ids), vocab_size
        self._thread = ThreadPoolExecutor(1, "rollouts")  # the store's: it may block as long as a disk does
        self._tokenizer = decoder  # None: loaded in `open`
        self._agents: Agents | None = None
        self._trimmed = -1  # the step before which old rollouts were last removed
        self._unscored_steps = 0  # in a row, up to the last one
        # By step and position of the first prompt
        self._dispatched: dict[tuple[int, int], tuple[StepSession, Sampling]] = {}
        self._evaluation: asyncio.Task[list[ProblemResult]] | None = None
        self._first_sync: int | None = None  # the version of this process's first weight sync
        self._counted: StepSession | None = None  # that of the last step or round, whose responses `done` counts
        self.done = self.tokens = 0  # responses finished in the present command, and their tokens

    async def open(self, reading: Callable[[], Coroutine[Any, Any, tuple]] | None = None) -> None:
        """`reading`: waits for `eos_token_ids` and `decoder` where they come while the servers start."""
        config = self._config
        self._store = RolloutStore(config.output_dir)
        self._retention = Retention(Path(config.output_dir), config.rollout.keep_last)
        self._stack.callback(self._store.close)
        self._stack.callback(self._thread.shutdown)  # runs before `close`: a line may be being written
        session = await self._stack.enter_async_context(open_session())
        self._pool = RewardPool(config.reward)
        self._stack.callback(self._pool.close)
        self._fleet = Fleet(config, session, self._eos_token_ids, self._vocab_size, self._routes)
        self._fleet_run = asyncio.create_task(self._fleet.run())
        self._stack.push_async_callback(self._end_fleet)
        await asyncio.to_thread(self._pool.start)  # finds a missing reward function in a second
        if reading is not None:
            self._eos_token_ids[:], self._tokenizer = await reading()
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path)
        self._scoring = Scoring(config.reward, self._pool, self._tokenizer)
        if config.rollout.agent is not None:
            tokenizer = await asyncio.to_thread(load_tokenizer, config.model.path, config.data.chat_template)
            model = config.model
            length = model.max_length or load_model_config(model.path, source=model.source).max_positions
            chat = ChatTokens(tokenizer, self._eos_token_ids, template_variables(config.data))
            self._agents = Agents(config, self._fleet, chat, length, self._vocab_size)
            await self._agents.open(self._stack)
        self._stack.push_async_callback(self._end_dispatched)
        await self.watched(self._fleet.wait_started())

    async def _end_fleet(self) -> None:
        self._fleet_run.cancel()
        await asyncio.wait([self._fleet_run])

    async def watched(self, work: Coroutine) -> Any:
        """Returns what `work` returns. Raises RolloutError where the task that runs the servers has ended."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._fleet_run}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            del task  # it holds its exception, which holds this frame and the rollouts
        error = first_error(self._fleet_run.exception())
        raise RolloutError(f"the task that runs the rollout servers has ended: {error!r}") from error

    async def begin_sync(self, version: int) -> list[Endpoint]:
        if self._first_sync is None:
            self._first_sync = version
            if staleness := self._config.rollout.max_staleness:
                await self._in_thread(self._store.remove_after, version + 1 + staleness)
        if self._evaluation is not None:  # it evaluates the weights that the servers still have
            await asyncio.wait([self._evaluation])
        return await self._fleet.begin_sync(version)

    async def end_sync(self, version: int, outcomes: dict[Endpoint, str | None]) -> None:
        await self._fleet.end_sync(version, outcomes)
        for _, sampling in self._dispatched.values() if self._config.rollout.max_staleness else ():
            sampling.go_on()
        give_back_freed_memory(version)  # altered or very long replies leave holes in the heap

    async def condemn(self, lost: dict[Endpoint, str]) -> None:
        for endpoint, why in lost.items():
            self._fleet.mark_failed(endpoint, why)

    async def dispatch(self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int = 0) -> None:
        """See RolloutWorker.dispatch."""
        if (step, first) in self._dispatched:  # it goes on after a weight sync
            return
        if not self._dispatched:
            self._fleet.work_begins()
        session = await self._open_session(step, prompts, counts, first)
        anew = len(session.wanted) - len(session.outcomes)
        # New rollouts lead to other weights; the rollouts of later steps on disk are of the old weights.
        if anew and not self._config.rollout.max_staleness:
            removed = await self._in_thread(self._store.remove_after, step)
            notes = [f"step {step}: {anew} rollouts sampled anew; removed those of {removed} later steps"]
            session.notes += notes if removed else []
        requests = [request for name, request in session.wanted.items() if name not in session.outcomes]
        sampling = self._sampling(requests, functools.partial(self._take, session))
        sampling.start()
        self._dispatched[step, first] = session, sampling

    def _sampling(self, requests: Sequence[Request], take: Callable, urgent: bool = False) -> Sampling:
        agents = self._agents
        answer = None if agents is None else functools.partial(agents.episode, urgent=urgent)
        return Sampling(self._fleet, requests, take, urgent, answer)

    async def _end_dispatched(self) -> None:
        for _, sampling in self._dispatched.values():
            await sampling.end()
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.wait([self._evaluation])

    async def collect(self, step: int, first: int = 0) -> RolloutResult:
        """See RolloutWorker.collect."""
        session, sampling = self._dispatched[step, first]
        self._counted, self.done = session, len(session.outcomes)
        sampling.go_on()  # not in `end_sync`: with `rollout.offload` the servers have no KV cache there
        await sampling.wait()
        del self._dispatched[step, first]
        if first == 0:  # a later round only adds to these
            self._check_rewards(session)
        seconds, uses = self._fleet.take_use()
        result = session.result(self._fleet.notes, uses)
        self._fleet.notes.clear()
        return dataclasses.replace(result, seconds_ahead=seconds) if self._config.rollout.max_staleness else result

    async def _open_session(
        self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int
    ) -> StepSession:
        """Returns a session with the rollouts that are on disk already."""
        rollout, version, notes = self._config.rollout, self._fleet.version or 0, []
        complete = max(1, step - rollout.max_staleness)  # the files of earlier steps are complete
        if self._trimmed != step:
            self._trimmed = step
            notes = [f"step {step}: {note}" for note in await self._in_thread(self._retention.trim, complete)]
        wanted = wanted_rollouts(step, prompts, counts, first, self._config.seed)
        session, versions = StepSession(step, wanted, notes), range(version, version + 1)
        if rollout.max_staleness:  # versions after the first weight sync may not come again with the same weights
            versions = range(max(0, step - 1 - rollout.max_staleness), (self._first_sync or 0) + 1)
        groups = {group_id(step, position) for position in range(first, first + len(prompts))}

        def reuse() -> None:
            largest = None if self._agents is None else self._agents.limits(None).trained
            trained = not rollout.max_staleness and next(self._store.lines(step + 1), None) is not None
            lines = self._store.lines(step, groups)
            if gone := session.reuse(lines, versions, rollout.max_new_tokens, largest, trained):
                self._store.discard(step, gone)

        await self._in_thread(reuse)
        return session

    async def _take(self, session: StepSession, request: Request, response: Response, server: str) -> None:
        session.answer(request.name, response, server)
        rollout, failure = await self._scoring.rollout(session.step, request, response, server)
        await self._in_thread(self._store.append, rollout)
        session.keep(rollout, failure)
        if session is self._counted:
            self._finished(response)

    async def _in_thread(self, work: Callable, *arguments: Any) -> Any:
        """Returns the result of `work`, which runs in the store's thread after all earlier calls. The servers are still
        watched meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _check_rewards(self, session: StepSession) -> None:
        """Raises RewardError where all rewards of UNSCORED_STEPS steps in a row have failed."""
        unscored = session.all_unscored and session.reused < len(session.wanted)
        self._unscored_steps = self._unscored_steps + 1 if unscored else 0
        if self._unscored_steps == UNSCORED_STEPS:
            raise RewardError(
                f"step {session.step}: not one rollout of {UNSCORED_STEPS} steps in a row could be scored; the last "
                f"failure: {'; '.join(session.unscored.values())}"
            )

    async def reject(self, step: int, rollout_ids: Sequence[str]) -> None:
        """Marks rollouts of the last call as rejected. A server with too large a share of rejected rollouts is
        restarted."""
        await self._in_thread(self._store.reject, step, rollout_ids)
        answered = self._counted.answered
        whole, part = Counter(answered.values()), Counter(answered[name] for name in rollout_ids if name in answered)
        self._fleet.rejected({server: count / whole[server] for server, count in part.items()})

    async def evaluate(self, prompts: Sequence[Prompt], beside: bool = False) -> list[ProblemResult]:
        """`beside`: other commands are carried out meanwhile, and `done` counts their responses only; a weight sync
        waits for the evaluation."""
        samples, call = self._config.eval.samples, uuid.uuid4().hex[:8]
        outcomes: dict[str, Evaluated] = {}
        by_group = {f"eval-{call}-{position}": prompt for position, prompt in enumerate(prompts)}

        async def take(request: Request, response: Response, server: str) -> None:
            text, score = await self._scoring.score(request.prompt, response)
            outcomes[request.name] = Evaluated(response, score, text)
            if not beside:
                self._finished(response)

        requests = evaluation_requests(self._config, by_group)
        await self._sampling(requests, take, urgent=beside).run()
        check_evaluation(outcomes)
        by_prompt = ((p, [outcomes[f"{group}-{k}"] for k in range(samples)]) for group, p in by_group.items())
        return [problem_result(prompt, evaluated, self._tokenizer) for prompt, evaluated in by_prompt]

    async def begin_evaluation(self, prompts: Sequence[Prompt]) -> None:
        self._evaluation = asyncio.create_task(self.evaluate(prompts, beside=True))

    async def end_evaluation(self) -> list[ProblemResult]:
        task, self._evaluation = self._evaluation, None
        return await task

    def _finished(self, response: Response) -> None:
        self.done += 1
        self.tokens += len(response.tokens)
