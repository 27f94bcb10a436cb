"""One step's generation: which rollouts are wanted, and what has become of each so far."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.dispatch import Request
from dynamo_megatron.rollout.result import Outcome, RolloutResult, ServerUse, group_id, rollout_id
from dynamo_megatron.runtime.array_sharing import concatenate
from dynamo_megatron.runtime.seeds import derived_seed
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout, RolloutBatch, plain_data

LISTED = 3  # prompts named in a note
UNSCORED = ("reward_timeout", "reward_error")  # statuses of rollouts whose reward function failed: reward 0


def wanted_rollouts(
    step: int, prompts: Sequence[Prompt], counts: Sequence[int], first: int, seed: int
) -> dict[str, Request]:
    """Returns a request for each rollout that is wanted, by rollout_id, in batch order. `first`: the position of the
    first prompt. `seed`: the run's."""
    wanted = {}
    for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first):
        group = group_id(step, position)
        for name in (rollout_id(group, k) for k in range(n)):
            own = derived_seed(seed, "rollout", name)
            wanted[name] = Request(name, group, prompt, prompt.tokens, own, routes_from=0)
    return wanted


@dataclass
class StepSession:
    """The rollouts of a step, or of one of its rounds, while they are generated. An outcome is final.

    The rollouts that can be trained on are kept as batches of one: arrays take a fifth of the memory that lists take,
    and a fifth of the time at a step's end."""

    step: int
    wanted: dict[str, Request]  # by rollout_id, in batch order, as the fields below
    notes: list[str] = field(default_factory=list)  # for the user
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    batches: dict[str, RolloutBatch] = field(default_factory=dict)
    reused: int = 0  # outcomes that are from an interrupted run
    started: float = field(default_factory=time.monotonic)
    errors: list[str] = field(default_factory=list)  # of responses that did not come
    unscored: dict[str, str] = field(default_factory=dict)  # status -> how the last reward of it failed
    answered: dict[str, str] = field(default_factory=dict)  # rollout_id -> server

    def reuse(
        self,
        lines: Iterable[Rollout],
        versions: range,
        max_new_tokens: int,
        largest: int | None = None,
        trained: bool = False,
    ) -> set[str]:
        """Keeps what an interrupted run left of these rollouts, the `lines` of their groups: those that weights of
        `versions` sampled. `largest`: tokens of an episode with all its segments. `trained`: the step has been trained
        on, without the failed, aborted and rejected ones and with 0 for failed rewards, and is again; else these are
        sampled anew. Of several lines with one rollout_id the last one counts. Returns the ids of all others: a later
        resume must not find them, since a version's weights may be others then."""
        discarded: dict[str, str] = {}
        not_wanted: set[str] = set()
        for rollout in lines:
            if (request := self.wanted.get(name := rollout.rollout_id)) is None:
                not_wanted.add(name)
                continue
            for earlier in (self.outcomes, self.batches, discarded):
                earlier.pop(name, None)
            if trained and rollout.status in NOT_TRAINED:
                self.keep(rollout, "")
            elif not trained and rollout.status in UNSCORED:  # its user may have repaired the reward function
                discarded[name] = f"with reward 0 for a {rollout.status}"
            elif why := _unwanted(rollout, request.prompt, versions, max_new_tokens, largest):
                discarded[name] = why
            else:
                self.keep(rollout, "")
        self.reused = len(self.outcomes)
        of = f"step {self.step}:"
        if self.reused:
            self.notes.append(f"{of} {self.reused} rollouts of an interrupted run are reused, with their rewards")
        if discarded:
            reasons = ", ".join(f"{count} {why}" for why, count in sorted(Counter(discarded.values()).items()))
            self.notes.append(f"{of} discarded rollouts of an interrupted run: {reasons}")
        return not_wanted | discarded.keys()

    def answer(self, name: str, response: Response, server: str) -> None:
        """Records a response, or the error in its place; it is not scored yet."""
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

    def result(self, said: Sequence[str], uses: dict[str, ServerUse]) -> RolloutResult:
        """`said`: the fleet's notes. `uses`: of servers, by name."""
        batches = [self.batches[name] for name in self.wanted if name in self.batches]
        return RolloutResult(
            RolloutBatch.join(batches, concatenate),
            {name: self.outcomes[name] for name in self.wanted},
            time.monotonic() - self.started,
            [*self.notes, *(f"step {self.step}: {note}" for note in [*said, *self._failures()])],
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


def _unwanted(rollout: Rollout, prompt: Prompt, versions: range, max_new_tokens: int, largest: int | None) -> str:
    """Returns why the rollout is not wanted; "" where it is. `prompt`: of the request with its id."""
    if rollout.status in NOT_TRAINED:
        return rollout.status
    # An agent makes requests of its own.
    own = rollout.episode is not None or rollout.tokens[: rollout.response_mask.count(0)] == prompt.tokens
    if rollout.prompt_id != prompt.prompt_id or not own:
        return "of another prompt"
    if repr(rollout.answer) != repr(plain_data(prompt.answer)):  # a NaN does not equal itself
        return "of another answer in the data"
    if len(rollout.engine_logprobs) > max_new_tokens:
        return "of more than rollout.max_new_tokens"
    if largest is not None and len(rollout.tokens) > largest:
        return "of more than rollout.agent_tokens"
    return "of another weight version" if any(v not in versions for v, _, _ in rollout.weight_versions) else ""
