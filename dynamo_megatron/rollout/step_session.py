"""One step's generation: which rollouts are wanted, and what has become of each so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import ExpectedLengths
from dynamo_megatron.rollout.result import Accounted, RolloutError, RolloutResult, ServerUse, group_id, rollout_id
from dynamo_megatron.rollout.reuse import UNSCORED
from dynamo_megatron.rollout.sampling import Request, Sampling, tail_seconds
from dynamo_megatron.runtime.arena import Arena
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout

LISTED = 3  # prompts named in a note


def wanted_rollouts(step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int) -> dict[str, Prompt]:
    """Returns each rollout's prompt by rollout_id, in batch order. `first`: the position of the first prompt."""
    return {
        rollout_id(group_id(step, position), k): prompt
        for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first)
        for k in range(n)
    }


@dataclass
class StepSession:
    """The state of one call of `Generator.generate` or `Generator.dispatch`. If all servers are lost in `generate`, the
    next call continues with it: an outcome is final."""

    step: int
    wanted: dict[str, Prompt]  # by rollout_id, in batch order
    version: int | None  # of the weights
    rollouts: dict[str, Accounted]  # those that have an outcome, by rollout_id
    notes: list[str]  # for the user
    discarded: int  # rollouts of an interrupted run
    begun: Mapping[str, Response] = field(default_factory=dict)  # partial responses of that run, by rollout_id
    uses: dict[str, ServerUse] = field(default_factory=dict)  # by server
    started: float = field(default_factory=time.monotonic)
    errors: list[str] = field(default_factory=list)  # of responses that did not come
    unscored: dict[str, str] = field(default_factory=dict)  # status -> how the last reward of it failed
    finished: list[float] = field(default_factory=list)  # monotonic seconds, of each response
    answered: dict[str, str] = field(default_factory=dict)  # rollout_id -> server
    late: int = 0  # requests aborted at the step's deadline
    arena: Arena = field(default_factory=Arena)  # of the batch

    def __post_init__(self) -> None:
        self.reused = len(self.rollouts)

    def requests(self, lengths: ExpectedLengths, seed: int) -> list[Request]:
        """Returns requests for the wanted rollouts that have no outcome yet."""
        return [
            Request(
                name,
                name.rpartition("-")[0],
                prompt.prompt_id,
                prompt.tokens,
                lengths(prompt.prompt_id),
                derived_seed(seed, "rollout", name),
                begun=self.begun.get(name),
            )
            for name, prompt in self.wanted.items()
            if name not in self.rollouts
        ]

    def answer(self, name: str, response: Response, server: str) -> None:
        """Records a response, or the error in its place; it is not scored yet."""
        if response.error:
            self.errors.append(response.error)
        else:
            self.answered[name] = server

    def keep(self, rollout: Rollout, failure: str) -> None:
        """Records a rollout that is scored and on disk. `failure`: how its reward failed, "" where it did not."""
        if failure:
            self.unscored[rollout.status] = failure
        self.rollouts[rollout.rollout_id] = accounted = Accounted.of(rollout)
        if accounted.batch is not None:
            self.arena.grow(accounted.batch.nbytes)

    def add(self, sampling: Sampling) -> None:
        """Adds the servers' use and the times of `sampling`, which has ended."""
        self.use(sampling.uses)
        self.finished += sampling.finished
        self.late += sampling.late

    def use(self, uses: Mapping[str, ServerUse]) -> None:
        for server, use in uses.items():
            self.uses.setdefault(server, ServerUse()).add(use)

    def check_share(self, config: RolloutConfig) -> None:
        """Raises RolloutError where the step's deadline came before enough rollouts did."""
        there = len(self.wanted) - self.late
        if there < config.min_share * len(self.wanted):
            waited = ", ".join(sorted(name for name in self.uses if name)) or "a server"
            raise RolloutError(
                f"step {self.step}: {there} of {len(self.wanted)} rollouts were there at rollout.step_deadline "
                f"({config.step_deadline:g} s), rollout.min_share asks for {config.min_share:g} of them; "
                f"waited for {waited}"
            )

    @property
    def all_unscored(self) -> bool:
        """Whether there are rollouts to train on and the reward of each has failed."""
        statuses = {r.status for r in self.rollouts.values()} - set(NOT_TRAINED)
        return bool(statuses) and statuses <= set(UNSCORED)

    @property
    def groups(self) -> tuple[int, int]:
        """The number of groups in which every rollout has an outcome, and the number of all groups."""
        groups = {name.rpartition("-")[0] for name in self.wanted}
        under_way = {name.rpartition("-")[0] for name in self.wanted.keys() - self.rollouts.keys()}
        return len(groups - under_way), len(groups)

    def result(self, said: Sequence[str]) -> RolloutResult:
        """`said`: the fleet's notes."""
        now = time.monotonic()
        times = {
            "generate": now - self.started,
            "reward_tail": now - max(self.finished, default=self.started),
            "tail": tail_seconds(self.finished),
        }
        return RolloutResult.of(
            {name: self.rollouts[name] for name in self.wanted},
            reused=self.reused,
            discarded=self.discarded,
            times=times,
            notes=[*self.notes, *(f"step {self.step}: {note}" for note in [*self._failures(), *said])],
            uses=self.uses,
            concatenate=self.arena.concatenate,
        )

    def _failures(self) -> list[str]:
        wanted, notes = self.wanted, []
        for status, failure in self.unscored.items():
            named = {name for name, rollout in self.rollouts.items() if rollout.status == status}
            prompts = [prompt for name, prompt in wanted.items() if name in named]
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
