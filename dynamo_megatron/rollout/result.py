"""The result of a step's generation. Shared by live and recorded rollouts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dynamo_megatron.types import NOT_TRAINED, Rollout, RolloutBatch

OUTCOMES = {"stop": "completed", "length": "truncated", "abort": "aborted", "error": "failed"}
KINDS = (*OUTCOMES.values(), "rejected")


class RolloutError(RuntimeError):
    """Rollouts cannot be obtained: a server, the rollout process or the disk failed. The message is one line."""


class SyncNeeded(Exception):
    """No server is left that has the current weights; restarted ones wait for a weight sync.

    The step's finished rollouts are on disk: the same request, repeated after a weight sync, continues from there.
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
        self.kv_cache = max((s for s in (self.kv_cache, other.kv_cache) if s is not None), default=None)
        self.retries += other.retries
        self.restarts += other.restarts


@dataclass(frozen=True)
class Outcome:
    """What became of one requested rollout: "completed", "truncated", "aborted" (timed out, or aborted by the engine),
    "failed" or "rejected". `server`: the name of the server that answered, "" if none did. `status` as in a Rollout.
    `scores`: each reward function's score, or its state where it gave none. `episode`: as EpisodeRecord.counts."""

    kind: str
    server: str = ""
    status: str = "ok"
    scores: Mapping[str, float | str] = field(default_factory=dict)
    episode: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 0  # of the response

    @classmethod
    def of(cls, rollout: Rollout) -> Outcome:
        kind = "rejected" if rollout.status == "rejected" else OUTCOMES[rollout.finish_reason]
        scores = {**rollout.reward_parts, **rollout.reward_failures}
        episode = {} if rollout.episode is None else rollout.episode.counts
        return cls(kind, rollout.server, rollout.status, scores, episode, sum(rollout.response_mask))


@dataclass(frozen=True)
class RolloutResult:
    """The rollouts of one step.

    `batch`: the rollouts that can be trained on, by (prompt position, rollout index). `outcomes`: of every requested
    rollout, by rollout_id. `reused`: how many of these are an interrupted run's. `seconds`: of generation. `uses`: by
    server. `notes`: for the user, one line each.
    """

    batch: RolloutBatch
    outcomes: dict[str, Outcome]
    seconds: float
    notes: list[str]
    reused: int = 0
    uses: dict[str, ServerUse] = field(default_factory=dict)
    # Where servers work ahead of the ranks: the seconds since the step before was complete, in which `uses` are
    seconds_ahead: float | None = None

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], seconds: float, notes: list[str]) -> RolloutResult:
        """`rollouts`: one for each request, in batch order."""
        batch = RolloutBatch.from_rollouts([r for r in rollouts if r.status not in NOT_TRAINED])
        return cls(batch, {r.rollout_id: Outcome.of(r) for r in rollouts}, seconds, notes)

    @classmethod
    def join(cls, results: Sequence[RolloutResult]) -> RolloutResult:
        """Joins the parts of one step, at least one, in order. A single part is returned as it is."""
        if len(results) == 1:
            return results[0]
        uses: dict[str, ServerUse] = {}
        for result in results:
            for server, use in result.uses.items():
                uses.setdefault(server, ServerUse()).add(use)
        outcomes = {name: outcome for result in results for name, outcome in result.outcomes.items()}
        assert len(outcomes) == sum(len(r.outcomes) for r in results), "a rollout_id came twice"
        return cls(
            RolloutBatch.join([r.batch for r in results]),
            outcomes,
            sum(r.seconds for r in results),
            [note for result in results for note in result.notes],
            sum(r.reused for r in results),
            uses,
        )

    def without(self, rejected: Collection[int], notes: Sequence[str]) -> RolloutResult:
        """Returns this result with the rollouts `rejected` (indices in the batch) counted as rejected and removed from
        the batch."""
        names = [self.batch.rollout_ids[i] for i in rejected]
        outcomes = self.outcomes | {n: dataclasses.replace(self.outcomes[n], kind="rejected") for n in names}
        kept = np.setdiff1d(np.arange(len(self.batch.rollout_ids)), list(rejected)).astype(np.int64)
        batch = self.batch.take(kept)
        return dataclasses.replace(self, batch=batch, outcomes=outcomes, notes=[*self.notes, *notes])

    @property
    def counts(self) -> dict[str, int]:
        """requested = completed + truncated + aborted + failed + rejected; each other count is of some of these."""
        kinds = Counter(outcome.kind for outcome in self.outcomes.values())
        statuses = Counter(outcome.status for outcome in self.outcomes.values())
        return {
            "requested": len(self.outcomes),
            **{kind: kinds[kind] for kind in KINDS},
            "reused": self.reused,
            "reward_timeouts": statuses["reward_timeout"],
            "reward_errors": statuses["reward_error"],
        }

    @property
    def idle_share(self) -> float:
        """The share of `seconds_ahead` in which a server had no request under way, averaged over the servers; 1.0
        without a server."""
        busy = [use.busy for name, use in self.uses.items() if name]
        return 1 - min(1.0, sum(busy) / (max(1e-9, self.seconds_ahead) * len(busy))) if busy else 1.0

    @property
    def rejected_tokens(self) -> int:
        """Tokens of rejected responses."""
        return sum(outcome.tokens for outcome in self.outcomes.values() if outcome.kind == "rejected")

    @property
    def rewards(self) -> dict[str, list[float | str]]:
        """By reward function, its score of each response, or its state (`types.REWARD_STATES`) where it gave none."""
        found: dict[str, list[float | str]] = {}
        for outcome in self.outcomes.values():
            for function, score in outcome.scores.items():
                found.setdefault(function, []).append(score)
        return found

    @property
    def episodes(self) -> Counter[str]:
        """Sums of `EpisodeRecord.counts`; empty without an agent."""
        total: Counter[str] = Counter()
        for outcome in self.outcomes.values():
            total.update(outcome.episode)
        return total

    def check_accounts(self, requested: int) -> None:
        """Raises AssertionError unless every one of `requested` rollouts has exactly one outcome, and `batch` has
        exactly the completed and truncated ones."""
        ids, counts = self.batch.rollout_ids, self.counts
        assert counts["requested"] == requested, f"{requested} rollouts requested, {counts['requested']} on record"
        came = {name for name, outcome in self.outcomes.items() if outcome.kind in ("completed", "truncated")}
        assert len(ids) == len(set(ids)) and set(ids) == came, "what came and what is in the batch are not the same"


def group_id(step: int, position: int) -> str:
    """Returns the id of the group of the prompt at `position` in the batch of `step`."""
    return f"{step:06d}-{position:04d}"


def rollout_id(group: str, index: int) -> str:
    return f"{group}-{index:03d}"
