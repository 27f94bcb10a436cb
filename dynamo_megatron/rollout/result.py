"""The result of a step's generation. Shared by live and recorded rollouts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamo_megatron.errors import InputError
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout, RolloutBatch

OUTCOMES = {"stop": "completed", "length": "truncated", "abort": "aborted", "error": "failed"}
KINDS = (*OUTCOMES.values(), "rejected")


class RolloutError(RuntimeError):
    """Rollouts cannot be obtained: a server, the rollout process or the disk failed. The message is one line."""


class PushNeeded(Exception):
    """No server is left that has the current weights; restarted ones wait for a push.

    The step's finished rollouts are on disk: the same request, repeated after a push, continues from there.
    """


@dataclass
class ServerUse:
    """What a server did: tokens generated, seconds with a request under way, and what went wrong."""

    tokens: int = 0
    busy: float = 0.0
    kv_cache: float | None = None  # largest share of its KV cache in use that was seen; None: not measured
    retries: int = 0  # requests that were lost with it
    restarts: int = 0

    def add(self, other: ServerUse) -> None:
        self.tokens += other.tokens
        self.busy += other.busy
        self.kv_cache = _largest(self.kv_cache, other.kv_cache)
        self.retries += other.retries
        self.restarts += other.restarts


def _largest(*measured: float | None) -> float | None:
    return max((value for value in measured if value is not None), default=None)


@dataclass(frozen=True)
class Outcome:
    """What became of one requested rollout: "completed", "truncated", "aborted" (timed out, or aborted by the engine),
    "failed" or "rejected". `server`: the name of the server that answered, "" if none did."""

    kind: str
    server: str


@dataclass
class FunctionScores:
    """A reward function's results on the responses of a step: the number of responses by state (`types.REWARD_STATES`),
    and the sum of its scores."""

    states: Counter[str] = field(default_factory=Counter)
    total: float = 0.0

    def add(self, other: FunctionScores) -> None:
        self.states.update(other.states)
        self.total += other.total


@dataclass(frozen=True)
class Accounted:
    """One requested rollout: its outcome, each reward function's score (the state where it gave none), and, as a batch,
    the rollout itself where it can be trained on.

    Made when a rollout arrives: arrays take a fifth of the memory that lists take, and a fifth of the time at a step's
    end.
    """

    outcome: Outcome
    status: str
    batch: RolloutBatch | None
    scores: Mapping[str, float | str] = field(default_factory=dict)
    episode: Mapping[str, int] = field(default_factory=dict)  # as EpisodeRecord.counts
    rejected_tokens: int = 0  # of its response, if it was rejected

    @classmethod
    def of(cls, rollout: Rollout) -> Accounted:
        kind = "rejected" if rollout.status == "rejected" else OUTCOMES[rollout.finish_reason]
        batch = None if rollout.status in NOT_TRAINED else RolloutBatch.from_rollouts([rollout])
        scores = {**rollout.reward_parts, **rollout.reward_failures}
        episode = {} if rollout.episode is None else rollout.episode.counts
        tokens = sum(rollout.response_mask) if kind == "rejected" else 0
        return cls(Outcome(kind, rollout.server), rollout.status, batch, scores, episode, tokens)


@dataclass(frozen=True)
class Ahead:
    """In a run whose servers work ahead of its ranks, the state when a step's rollouts were complete: how many groups
    of later steps were complete and how many were not. `uses` of the result are then those of the `seconds` since the
    step before. `waited`: seconds that pushes have waited for an evaluation since then."""

    ready: int
    under_way: int
    seconds: float
    waited: float

    def idle_share(self, uses: Mapping[str, ServerUse]) -> float:
        """Returns the share of these seconds in which a server had no request under way, averaged over the servers;
        1.0 without a server."""
        busy = [use.busy for name, use in uses.items() if name]
        return 1 - min(1.0, sum(busy) / (max(1e-9, self.seconds) * len(busy))) if busy else 1.0


@dataclass(frozen=True)
class RolloutResult:
    """The rollouts of one step.

    `batch`: the rollouts that can be trained on, by (prompt position, rollout index). `outcomes`: the outcome of every
    requested rollout, by rollout_id; `reused`, `reward_timeouts` and `reward_errors` count some of these.
    `rejected_tokens`: tokens of rejected responses. `discarded`: number of rollouts of an interrupted
    run that were not reused. `rewards`: by reward function. `times`: seconds. `uses`: by server. `notes`: for the user,
    one line each. `episodes`: sums of `EpisodeRecord.counts`; empty without an agent.
    """

    batch: RolloutBatch
    outcomes: dict[str, Outcome]
    times: dict[str, float]
    notes: list[str]
    reused: int = 0
    discarded: int = 0
    reward_timeouts: int = 0
    reward_errors: int = 0
    rejected_tokens: int = 0
    uses: dict[str, ServerUse] = field(default_factory=dict)
    ahead: Ahead | None = None  # None: nothing is generated ahead
    rewards: dict[str, FunctionScores] = field(default_factory=dict)
    episodes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        rollouts: Mapping[str, Accounted],
        *,
        reused: int = 0,
        discarded: int = 0,
        times: dict[str, float],
        notes: list[str],
        uses: dict[str, ServerUse] | None = None,
        concatenate: Callable[[Sequence[np.ndarray]], np.ndarray] = np.concatenate,
    ) -> RolloutResult:
        """`rollouts`: one for each request, by rollout_id, in batch order. `concatenate`: as RolloutBatch.join."""
        statuses = Counter(r.status for r in rollouts.values())
        batches = [r.batch for r in rollouts.values() if r.batch is not None]
        return cls(
            RolloutBatch.join(batches, concatenate) if batches else RolloutBatch.from_rollouts([]),
            {name: r.outcome for name, r in rollouts.items()},
            times,
            notes,
            reused,
            discarded,
            statuses["reward_timeout"],
            statuses["reward_error"],
            sum(r.rejected_tokens for r in rollouts.values()),
            uses or {},
            rewards=_by_function(r.scores for r in rollouts.values()),
            episodes=_total(r.episode for r in rollouts.values()),
        )

    @classmethod
    def join(cls, results: Sequence[RolloutResult]) -> RolloutResult:
        """Joins the parts of one step, at least one, in order. A single part is returned as it is."""
        if len(results) == 1:
            return results[0]
        times, uses = Counter(), {}
        rewards: dict[str, FunctionScores] = {}
        for result in results:
            for function, scores in result.rewards.items():
                rewards.setdefault(function, FunctionScores()).add(scores)
            times.update(result.times)
            for server, use in result.uses.items():
                uses.setdefault(server, ServerUse()).add(use)
        outcomes = {name: outcome for result in results for name, outcome in result.outcomes.items()}
        assert len(outcomes) == sum(len(r.outcomes) for r in results), "a rollout_id came twice"
        return cls(
            RolloutBatch.join([r.batch for r in results]),
            outcomes,
            dict(times),
            [note for result in results for note in result.notes],
            sum(r.reused for r in results),
            sum(r.discarded for r in results),
            sum(r.reward_timeouts for r in results),
            sum(r.reward_errors for r in results),
            sum(r.rejected_tokens for r in results),
            uses,
            rewards=rewards,
            episodes=_total(r.episodes for r in results),
        )

    def without(self, rejected: Collection[int], notes: Sequence[str]) -> RolloutResult:
        """Returns this result with the rollouts `rejected` (indices in the batch) counted as rejected and removed from
        the batch."""
        names = [self.batch.rollout_ids[i] for i in rejected]
        outcomes = self.outcomes | {n: Outcome("rejected", self.outcomes[n].server) for n in names}
        kept = np.setdiff1d(np.arange(len(self.batch.rollout_ids)), list(rejected)).astype(np.int64)
        return dataclasses.replace(
            self,
            batch=self.batch.take(kept),
            outcomes=outcomes,
            notes=[*self.notes, *notes],
            rejected_tokens=self.rejected_tokens
            + int(self.batch.response_lengths[np.array(list(rejected), np.int64)].sum()),
        )

    @property
    def counts(self) -> dict[str, int]:
        """requested = completed + truncated + aborted + failed + rejected; each other count is of some of these."""
        kinds = Counter(outcome.kind for outcome in self.outcomes.values())
        return {
            "requested": len(self.outcomes),
            **{kind: kinds[kind] for kind in KINDS},
            "reused": self.reused,
            "reward_timeouts": self.reward_timeouts,
            "reward_errors": self.reward_errors,
        }

    @property
    def counts_by_server(self) -> dict[str, dict[str, int]]:
        """The same five kinds for each server; "" stands for the rollouts that no server answered."""
        servers = sorted({outcome.server for outcome in self.outcomes.values()})
        kinds = Counter((outcome.server, outcome.kind) for outcome in self.outcomes.values())
        return {server: {kind: kinds[server, kind] for kind in KINDS} for server in servers}

    def check_accounts(self, requested: int) -> None:
        """Checks that every one of `requested` rollouts has exactly one outcome, and that `batch` has exactly the
        completed and truncated ones.

        Raises AssertionError.
        """
        counts = self.counts
        assert counts["requested"] == requested, f"{requested} rollouts requested, {counts['requested']} on record"
        assert requested == sum(counts[kind] for kind in KINDS), f"the accounts do not close: {counts}"
        by_server = self.counts_by_server.values()
        assert all(counts[kind] == sum(c[kind] for c in by_server) for kind in KINDS), "servers and sum disagree"
        ids = self.batch.rollout_ids
        came = {name for name, outcome in self.outcomes.items() if outcome.kind in ("completed", "truncated")}
        assert len(ids) == len(set(ids)) and set(ids) == came, "what came and what is in the batch are not the same"


def _by_function(scores: Iterable[Mapping[str, float | str]]) -> dict[str, FunctionScores]:
    """`scores`: the `Accounted.scores` of each rollout."""
    found: dict[str, FunctionScores] = {}
    for of_one in scores:
        for function, score in of_one.items():
            own = found.setdefault(function, FunctionScores())
            own.states[score if isinstance(score, str) else "scored"] += 1
            own.total += 0.0 if isinstance(score, str) else score
    return found


def _total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for of_one in counts:
        total.update(of_one)
    return total


def group_id(step: int, position: int) -> str:
    """Returns the id of the group of the prompt at `position` in the batch of `step`."""
    return f"{step:06d}-{position:04d}"


def position_of(group: str) -> int:
    return int(group.rpartition("-")[2])


def rollout_id(group: str, index: int) -> str:
    return f"{group}-{index:03d}"


def check_request(prompts: Sequence[Prompt], counts: Sequence[int]) -> None:
    """Raises ValueError where the numbers of counts and prompts differ, or a prompt was not tokenized."""
    if len(prompts) != len(counts):
        raise InputError(f"counts: {len(counts)} for {len(prompts)} prompts")
    for prompt in prompts:
        if not prompt.tokens:
            raise InputError(f"prompt {prompt.prompt_id!r} has no tokens")
