"""One step's generation: which rollouts are wanted, and what has become of each so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import ExpectedLengths, Request
from dynamo_megatron.rollout.result import (
    Outcome,
    RolloutResult,
    ServerUse,
    SyncNeeded,
    group_id,
    rollout_id,
)
from dynamo_megatron.rollout.reuse import UNSCORED
from dynamo_megatron.rollout.sampling import Sampling, tail_seconds
from dynamo_megatron.runtime.array_sharing import concatenate
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout, RolloutBatch

LISTED = 3  # prompts named in a note


def wanted_rollouts(
    step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int, lengths: ExpectedLengths, seed: int
) -> dict[str, Request]:
    """Returns a request for each rollout that is wanted, by rollout_id, in batch order. `first`: the position of the
    first prompt. `seed`: the run's."""
    wanted = {}
    for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first):
        group, expected = group_id(step, position), lengths(prompt.prompt_id)
        for name in (rollout_id(group, k) for k in range(n)):
            own = derived_seed(seed, "rollout", name)
            wanted[name] = Request(name, group, prompt, prompt.tokens, expected, own, routes_from=0)
    return wanted


@dataclass
class StepSession:
    """The rollouts of a step, or of one of its rounds, while they are generated. An outcome is final.

    The rollouts that can be trained on are kept as batches of one: arrays take a fifth of the memory that lists take,
    and a fifth of the time at a step's end."""

    step: int
    wanted: dict[str, Request]  # by rollout_id, in batch order, as the fields below
    outcomes: dict[str, Outcome]
    batches: dict[str, RolloutBatch]
    notes: list[str] = field(default_factory=list)  # for the user
    started: float = field(default_factory=time.monotonic)
    errors: list[str] = field(default_factory=list)  # of responses that did not come
    unscored: dict[str, str] = field(default_factory=dict)  # status -> how the last reward of it failed
    finished: list[float] = field(default_factory=list)  # monotonic seconds, of each response
    answered: dict[str, str] = field(default_factory=dict)  # rollout_id -> server

    def __post_init__(self) -> None:
        self.reused = len(self.outcomes)

    def answer(self, name: str, response: Response, server: str) -> None:
        """Records a response, or the error in its place; it is not scored yet."""
        self.finished.append(time.monotonic())
        if response.error:
            self.errors.append(response.error)
        else:
            self.answered[name] = server

    def keep(self, rollout: Rollout, failure: str) -> None:
        """Records a rollout that is scored and on disk. `failure`: how its reward failed, "" where it did not."""
        name = rollout.rollout_id
        if failure:
            self.unscored[rollout.status] = failure
        self.outcomes[name] = Outcome.of(rollout)
        if rollout.status not in NOT_TRAINED:
            self.batches[name] = RolloutBatch.from_rollouts([rollout])

    @property
    def all_unscored(self) -> bool:
        """Whether there are rollouts to train on and the reward of each has failed."""
        statuses = {outcome.status for outcome in self.outcomes.values()} - set(NOT_TRAINED)
        return bool(statuses) and statuses <= set(UNSCORED)

    @property
    def groups(self) -> tuple[int, int]:
        """The number of groups in which every rollout has an outcome, and the number of all groups."""
        groups = {wanted.group for wanted in self.wanted.values()}
        under_way = {wanted.group for name, wanted in self.wanted.items() if name not in self.outcomes}
        return len(groups - under_way), len(groups)

    def result(self, said: Sequence[str], uses: dict[str, ServerUse]) -> RolloutResult:
        """`said`: the fleet's notes. `uses`: of servers, by name."""
        now = time.monotonic()
        times = {
            "generate": now - self.started,
            "reward_tail": now - max(self.finished, default=self.started),
            "tail": tail_seconds(self.finished),
        }
        batches = [self.batches[name] for name in self.wanted if name in self.batches]
        return RolloutResult(
            RolloutBatch.join(batches, concatenate),
            {name: self.outcomes[name] for name in self.wanted},
            times,
            [*self.notes, *(f"step {self.step}: {note}" for note in [*self._failures(), *said])],
            self.reused,
            uses,
        )

    def _failures(self) -> list[str]:
        wanted, notes = self.wanted, []
        for status, failure in self.unscored.items():
            prompts = [wanted[name].prompt for name in wanted if self.outcomes[name].status == status]
            notes.append(
                f"{len(prompts)} of {len(wanted)} rollouts have reward 0 for a {status}, of {_listed(prompts)}; the "
                f"last: {failure}"
            )
        if self.errors:
            notes.append(f"{len(self.errors)} of {len(wanted)} rollouts failed; the first: {self.errors[0]}")
        return notes


def _listed(prompts: Sequence[Prompt]) -> str:
    """Names the first few prompts, each once."""
    labels = list(dict.fromkeys(p.label for p in prompts))
    more = f" and {len(labels) - LISTED} more" if len(labels) > LISTED else ""
    return f"prompt{'s' * (len(labels) > 1)} {', '.join(labels[:LISTED])}{more}"


class Dispatched:
    """Runs `sampling` for `session` from now on, while the ranks do something else (`rollout.max_staleness`). Create it
    in a running event loop."""

    def __init__(self, session: StepSession, sampling: Sampling):
        self.session, self.sampling = session, sampling
        self.task = asyncio.create_task(sampling.run())

    def go_on(self) -> None:
        """Samples the rest after a weight sync, even one that reached no server, where servers were lost."""
        if self.task.done() and isinstance(self.task.exception(), SyncNeeded):
            self.task = asyncio.create_task(self.sampling.run())

    async def wait(self) -> None:
        """Returns once each request has its outcome. Raises what `Sampling.run` does."""
        await asyncio.shield(self.task)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
