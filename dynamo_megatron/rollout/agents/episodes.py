"""A request for a rollout becomes an agent's conversation, and gets exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import chat_messages
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episode import Episode, Finished
from dynamo_megatron.rollout.agents.messages import BadRequest, Message
from dynamo_megatron.rollout.agents.pool import AgentFailed, AgentLost, AgentPool, Worker
from dynamo_megatron.rollout.agents.service import SessionService
from dynamo_megatron.rollout.agents.session import Limits, Session, tool_calls
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import Request, Siblings
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.sampling import ask
from dynamo_megatron.rollout.servers.fleet import Fleet, NoServer
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import EpisodeRecord, is_empty, plain_data

ATTEMPTS = 2  # at an episode whose agent's process is lost


class Agents:
    """What the episodes of a rollout process share: the agents' processes, the endpoint, how many run at once."""

    def __init__(self, config: Config, fleet: Fleet, chat: ChatTokens, length: int, vocab_size: int):
        """`length`: tokens that the model can read; `vocab_size`: rows of its embedding."""
        rollout = config.rollout
        self.config, self.fleet, self.chat = config, fleet, chat
        self.pool = AgentPool(rollout.agent, rollout.agent_python, rollout.agent_workers)
        self.service = SessionService()
        self._free = asyncio.Semaphore(rollout.agent_episodes)
        # An evaluation beside training would else wait for all episodes of the steps ahead, and a weight sync for
        # the evaluation.
        self._free_for_evaluation = asyncio.Semaphore(rollout.agent_episodes)
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
            for _ in range(2):
                try:
                    return tool_calls(await client.parse_tool_calls(text, tools, self.config.rollout.tool_parser))
                except RolloutError as failed:
                    error = str(failed)
            with contextlib.suppress(RolloutError):
                await client.parse_tool_calls("", tools, self.config.rollout.tool_parser)
                return text, []
        raise BadRequest(error)

    async def episode(self, request: Request, urgent: bool) -> tuple[Finished, str]:
        """Runs the agent for a request. Returns the outcome, and the server that gave the last answer. `urgent`: an
        evaluation beside training. Raises NoServer where no server is left: the episode has to start again."""
        async with self._free_for_evaluation if urgent else self._free:
            for number in range(ATTEMPTS):
                if not self.fleet.syncing and not self.fleet.serving():
                    raise NoServer
                try:
                    async with self.pool.own_process() if number else contextlib.nullcontext() as worker:
                        attempt = _Attempt(self, request, number)
                        outcome = await attempt.run(worker)
                    break
                except AgentLost as lost:
                    why = f"{request.name}: lost with its process {ATTEMPTS} times; the last: {lost}"
                    outcome = attempt.failed("error", why), attempt.server
        del self.starts[request.name]
        return outcome


class _Attempt:
    """One run of the agent for a request."""

    def __init__(self, agents: Agents, request: Request, number: int):
        self._agents, self._request, self._number, self._prompt = agents, request, number, request.prompt
        self._until = time.monotonic() + agents.config.rollout.timeout_of(request.max_new_tokens)
        self.server, self._turns = "", Siblings()
        self._ended = asyncio.get_running_loop().create_future()  # requests under way are refused then
        self._no_server = asyncio.Event()
        self._session = Session(
            Episode(agents.chat),
            agents.limits(request.max_new_tokens),
            self._sample,
            lambda text, tools: agents.parse_tools(text, tools, self.server),
        )

    async def run(self, worker: Worker | None) -> tuple[Finished, str]:
        """`worker`: as AgentPool.run's. Raises AgentLost, NoServer."""
        session, service, name = self._session, self._agents.service, self._request.name
        self._agents.starts[name] += 1
        key, url = service.open(session)
        error, finish, reward = "", "error", None
        given = f"{name}.{self._number}", self._given(), url, self._until, worker
        tasks = [asyncio.create_task(work) for work in (self._agents.pool.run(*given), self._no_server.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise NoServer
            reward = tasks[0].result()
        except AgentFailed as failed:
            error = self._error_of(failed)
        except TimeoutError:
            limit = self._agents.config.rollout.timeout_of(self._request.max_new_tokens)
            error, finish = f"{name}: no end of the episode within rollout.timeout ({limit:g} s)", "abort"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
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
        if is_empty(self._prompt.answer):
            limit = f"{self._request.name}: reached the limit of {' and '.join(reached)}"
            return f"{limit}; then the agent raised, and the row has no answer to score with: {failed}"
        return ""

    def failed(self, finish: str, error: str) -> Finished:
        tokens = list(self._prompt.tokens)
        record = EpisodeRecord([0], self._counts, *self._said, reason=plain_data(error))
        return Finished(finish_reason=finish, error=error, sequence=tokens, mask=[0] * len(tokens), record=record)

    def _finished(self, reward: float | None) -> Finished:
        session, trained = self._session, self._session.episode.trained
        messages, tools = self._said
        record = replace(trained.record, counts=self._counts, messages=messages, tools=tools)
        finish = "length" if session.reached else "stop"
        return replace(trained, finish_reason=finish, record=record, text=session.texts[-1], reward=reward)

    @property
    def _counts(self) -> dict[str, int]:
        """As EpisodeRecord's."""
        again = self._agents.starts[self._request.name] - 1
        return self._session.counts | ({"restarts": again} if again else {})

    @property
    def _said(self) -> tuple[list[Message] | None, list[Message] | None]:
        """`messages` and `tools` of the record: any text may be in them. Answers that were cut short say so."""
        if not (turns := [turn for turn in self._session.episode.turns if turn.messages]):
            return None, None
        messages = list(turns[-1].messages)
        for turn in turns:
            until = len(turn.messages)
            if turn.response.finish_reason == "length" and turns[-1].messages[:until] == turn.messages:
                messages[until - 1] = {**messages[until - 1], "finish_reason": "length"}
        return plain_data(messages), plain_data(turns[-1].place.tools)

    def _given(self) -> dict:
        fields = {name: getattr(self._prompt, name) for name in ("prompt_id", "text", "answer", "source", "meta")}
        messages = chat_messages(self._prompt, self._agents.config.data.system_prompt)
        return plain_data(fields | {"messages": messages})

    async def _sample(self, ids: list[int], most: int, stop: tuple[str, ...], number: int, known: int) -> Response:
        request = self._request
        turn = Request(
            f"{request.name}.{self._number}.{number}",
            request.name,
            request.prompt,
            ids,
            # The first turn is sampled as a rollout without an agent is.
            request.seed if number == 0 else derived_seed(request.seed, "turn", str(number)),
            request.temperature,
            most,
            stop,
            None if request.routes_from is None else known,
            siblings=self._turns,
            order=request.order,
            limit=self._until,
        )
        self._turns.count += 1
        asking = asyncio.create_task(ask(self._agents.fleet, turn))
        try:
            await asyncio.wait({asking, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise BadRequest("the episode has ended")
            response, self.server = asking.result()
        except NoServer:
            self._no_server.set()
            await asyncio.wait({self._ended})
            raise BadRequest("the episode has ended") from None
        finally:
            asking.cancel()
        return response
