"""Many episodes: each request for a rollout becomes an agent's conversation, and gets exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import chat_messages
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episode import Episode
from dynamo_megatron.rollout.agents.messages import BadRequest, Message
from dynamo_megatron.rollout.agents.pool import AgentFailed, AgentLost, AgentPool, Worker
from dynamo_megatron.rollout.agents.service import SessionService
from dynamo_megatron.rollout.agents.session import Limits, Session, tool_calls
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import Request, Siblings
from dynamo_megatron.rollout.result import RolloutError, SyncNeeded
from dynamo_megatron.rollout.sampling import ask
from dynamo_megatron.rollout.servers.fleet import Fleet, NoServer
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import EpisodeRecord, TurnRecord, plain_data

ATTEMPTS = 2  # at an episode whose agent's process is lost


@dataclass(frozen=True)
class Finished(Response):
    """An episode as a response to its prompt: what was sampled in all of its turns. `sequence` and `mask`: as a
    Rollout's tokens and response_mask. `text`: of the last answer. `reward`: the agent's; None: it gives none."""

    sequence: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    record: EpisodeRecord = field(default_factory=lambda: EpisodeRecord([0], {}))
    text: str = ""
    reward: float | None = None


class Agents:
    """What the episodes of a rollout process share: the agents' processes, the endpoint, how many run at once."""

    def __init__(self, config: Config, fleet: Fleet, chat: ChatTokens, length: int, vocab_size: int):
        """`length`: tokens that the model can read; `vocab_size`: rows of its embedding."""
        rollout = config.rollout
        self.config, self.fleet, self.chat = config, fleet, chat
        self.pool = AgentPool(rollout.agent, rollout.agent_python, rollout.agent_workers)
        self.service = SessionService()
        self.free = asyncio.Semaphore(rollout.agent_episodes)
        # An evaluation beside training would else wait for all episodes of the steps ahead, and a weight sync for
        # the evaluation.
        self.free_for_evaluation = asyncio.Semaphore(rollout.agent_episodes)
        self.starts: Counter[str] = Counter()  # of each episode that has no outcome yet, by its request's name
        stops = rollout.max_staleness == 0 or rollout.at_sync == "drain"
        trained = rollout.agent_tokens or max(config.trainer.micro_batch_tokens, length)
        self._limits = Limits(rollout.agent_turns, rollout.max_new_tokens, length, vocab_size, trained, stops)
        self._told: set[str] = set()  # fields of requests that a note has named

    async def open(self, stack: AsyncExitStack) -> None:
        """Raises InputError where the agent cannot be loaded. `stack` ends it all."""
        stack.push_async_callback(self.pool.close)
        stack.push_async_callback(self.service.stop)
        await self.service.start()
        await self.pool.start()

    def limits(self, max_new_tokens: int | None) -> Limits:
        return self._limits if max_new_tokens is None else replace(self._limits, tokens=max_new_tokens)

    def note(self, ignored: Sequence[str]) -> None:
        """`ignored`: fields of an agent's requests."""
        if new := sorted(set(ignored) - self._told):
            self._told.update(new)
            self.fleet.notes.append(
                f"the agent's requests set {', '.join(new)}, which is ignored: every answer is sampled as rollouts are"
            )

    async def parse_tools(self, text: str, tools: list[Message], first: str = "") -> tuple[str, list[Message]]:
        """`first`: the server to ask first. No calls where the parser fails on this text alone: it is a sample. Raises
        BadRequest where no server parses any."""
        error = "no rollout server is up to parse tool calls"
        for client in self.fleet.clients(first):
            try:
                return tool_calls(await client.parse_tool_calls(text, tools, self.config.rollout.tool_parser))
            except RolloutError as failed:
                error = str(failed)
            with contextlib.suppress(RolloutError):
                await client.parse_tool_calls("", tools, self.config.rollout.tool_parser)
                return text, []
        raise BadRequest(error)


class Episodes:
    """Runs an agent for each of `requests`. The same interface as Sampling, whose `take` gets `Finished` responses."""

    def __init__(
        self,
        agents: Agents,
        requests: Sequence[Request],
        take: Callable[[Request, Response, str], Awaitable[None]],
        urgent: bool = False,
    ):
        self.agents = agents
        self._pending, self._take = list(requests), take
        self._free = agents.free_for_evaluation if urgent else agents.free
        self._number = agents.fleet.next_number(urgent)
        self._lost: asyncio.Future[Exception]  # why no server is left
        self.begun: Mapping[str, Response] = {}  # an interrupted episode starts again

    async def run(self) -> None:
        """As `Sampling.run`. Where no server is left, the episodes that are under way end, and start again in the next
        call."""
        self._lost = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in self._pending:
                    tasks.create_task(self._one(request))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._lost.done():
            raise self._lost.result()

    async def _one(self, request: Request) -> None:
        episode = asyncio.create_task(self._episode(request))
        try:
            await asyncio.wait({episode, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not episode.done():
                return
        finally:
            episode.cancel()
            await asyncio.wait([episode])
        self._pending.remove(request)
        del self.agents.starts[request.name]
        await self._take(request, *episode.result())

    async def _episode(self, request: Request) -> tuple[Finished, str]:
        """The outcome, and the server that gave the last answer."""
        async with self._free:
            for attempt in range(ATTEMPTS):
                async with self.agents.pool.own_process() if attempt else contextlib.nullcontext() as worker:
                    limit = time.monotonic() + self.agents.config.rollout.timeout_of(request.max_new_tokens)
                    last = _Attempt(self, request, attempt, limit)
                    try:
                        return await last.run(worker)
                    except AgentLost as lost:
                        why = f"{request.name}: lost with its process {ATTEMPTS} times; the last: {lost}"
            return last.failed("error", why), last.server

    async def ask(self, turn: Request) -> tuple[Response, str]:
        """The answer to one turn, and who gave it. Where no server is left, waits for the end of all episodes."""
        turn.order = self._number, 0
        while True:
            with contextlib.suppress(NoServer):
                return await ask(self.agents.fleet, turn)
            try:
                await self.agents.fleet.wait_serving()
            except (SyncNeeded, RolloutError) as error:
                if not self._lost.done():
                    self._lost.set_result(error)
                await asyncio.Future()


class _Attempt:
    """One run of the agent for a request."""

    def __init__(self, episodes: Episodes, request: Request, number: int, until: float):
        self._episodes, self._request, self._number, self._until = episodes, request, number, until
        self._agents, self._prompt = episodes.agents, request.prompt
        self.server, self._turns = "", Siblings()
        self._ended = asyncio.get_running_loop().create_future()  # requests under way are refused then
        limits = self._agents.limits(request.max_new_tokens)
        self._session = Session(Episode(self._agents.chat), limits, self._sample, self._parse_tools)

    async def run(self, worker: Worker | None) -> tuple[Finished, str]:
        """`worker`: as AgentPool.run's. Raises AgentLost."""
        session, service, name = self._session, self._agents.service, self._request.name
        self._agents.starts[name] += 1
        key, url = service.open(session)
        error, finish, reward = "", "error", None
        try:
            reward = await self._agents.pool.run(f"{name}.{self._number}", self._given(), url, self._until, worker)
        except AgentFailed as failed:
            error = self._error_of(failed)
        except TimeoutError:
            error, finish = self._too_late(), "abort"
        finally:
            service.close(key)
            session.ended = True
            self._ended.set_result(None)
            self._agents.note(list(session.ignored))
        if session.failure and finish != "abort":
            error = session.failure
            finish = "abort" if time.monotonic() >= self._until else "error"
        elif not session.episode.turns and not error:
            error = f"{name}: the agent asked for no answer"
        return (self.failed(finish, error) if error else self._finished(reward)), self.server

    def _error_of(self, failed: AgentFailed) -> str:
        """Why the episode of an agent that raised is not scored; "" where it is. An agent that reached a limit gave no
        reward, so the functions of reward.functions score the episode; without an answer of the row they have nothing
        to compare with, and would end the run."""
        reached = sorted(self._session.reached)
        if not (reached and self._session.episode.turns):
            return f"{self._request.name}: the agent failed: {failed}"
        if self._prompt.answer is None:
            limit = f"{self._request.name}: reached the limit of {' and '.join(reached)}"
            return f"{limit}; then the agent raised, and the row has no answer to score with: {failed}"
        return ""

    def failed(self, finish: str, error: str) -> Finished:
        tokens = list(self._prompt.tokens)
        record = EpisodeRecord([0], self._counts, *self._said, reason=plain_data(error))
        return Finished(finish_reason=finish, error=error, sequence=tokens, mask=[0] * len(tokens), record=record)

    def _finished(self, reward: float | None) -> Finished:
        session, trained = self._session, self._session.episode.trained
        sampled = trained.sampled
        turns = [
            TurnRecord(*trained.spans[turn], *(round(seconds, 3) for seconds in turn.times))
            for turn in session.episode.turns
        ]
        return Finished(
            sampled.tokens,
            sampled.logprobs,
            sampled.weight_versions,
            "length" if session.reached else "stop",
            routes=trained.token_routes,
            sequence=trained.tokens,
            mask=trained.mask,
            record=EpisodeRecord(trained.starts, self._counts, *self._said, turns),
            text=session.texts[-1],
            reward=reward,
        )

    @property
    def _counts(self) -> dict[str, int]:
        """As EpisodeRecord's."""
        again = self._agents.starts[self._request.name] - 1
        return self._session.counts | ({"restarts": again} if again else {})

    @property
    def _said(self) -> tuple[list[Message] | None, list[Message] | None]:
        """`messages` and `tools` of the record: any text may be in them."""
        last = next((turn for turn in reversed(self._session.episode.turns) if turn.messages), None)
        return (None, None) if last is None else (plain_data(last.messages), plain_data(last.place.tools))

    def _given(self) -> dict:
        prompt = self._prompt
        return plain_data(
            {
                "prompt_id": prompt.prompt_id,
                "messages": chat_messages(prompt, self._agents.config.data.system_prompt),
                "text": prompt.text,
                "answer": prompt.answer,
                "source": prompt.source,
                "meta": prompt.meta,
            }
        )

    def _too_late(self) -> str:
        limit = self._agents.config.rollout.timeout_of(self._request.max_new_tokens)
        return f"{self._request.name}: no end of the episode within rollout.timeout ({limit:g} s)"

    async def _sample(self, ids: list[int], most: int, stop: tuple[str, ...], number: int, known: int) -> Response:
        request = self._request
        turn = Request(
            f"{request.name}.{self._number}.{number}",
            request.name,
            request.prompt,
            ids,
            min(request.expected, most),
            # The first turn is sampled as a rollout without an agent is.
            request.seed if number == 0 else derived_seed(request.seed, "turn", str(number)),
            request.temperature,
            most,
            stop,
            None if request.routes_from is None else known,
            siblings=self._turns,
            limit=self._until,
        )
        self._turns.tokens += turn.expected
        asking = asyncio.create_task(self._episodes.ask(turn))
        try:
            await asyncio.wait({asking, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise BadRequest("the episode has ended")
            response, self.server = asking.result()
        finally:
            asking.cancel()
        return response

    async def _parse_tools(self, text: str, tools: list[Message]) -> tuple[str, list[Message]]:
        return await self._agents.parse_tools(text, tools, self.server)
