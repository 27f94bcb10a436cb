"""What a step's generation comes to. Shared by live and recorded rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dynamo_megatron.records import NOT_TRAINED, Prompt, Rollout, RolloutBatch

OUTCOMES = {"stop": "completed", "length": "truncated", "abort": "aborted", "error": "failed"}


class RolloutError(RuntimeError):
    """Rollouts cannot be had: a server, the rollout process or the disk failed. The message is one line."""


class PushNeeded(Exception):
    """No server is left that has the current weights; restarted ones wait for a push.

    What was finished of the step is on disk: the same request after a push goes on from there.
    """


@dataclass(frozen=True)
class RolloutResult:
    """The rollouts of one step.

    `batch` has those that can be trained on, by (prompt position, rollout index). `counts`: requested = completed +
    truncated + aborted (timed out, or ended by the engine) + failed + rejected; reused, reward_timeouts and
    reward_errors count among these. `times`: seconds. `notes`: what the user should read, one line each.
    """

    batch: RolloutBatch
    counts: dict[str, int]
    times: dict[str, float]
    notes: list[str]

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], *, reused: int = 0, times: dict[str, float], notes: list[str]
    ) -> RolloutResult:
        """`rollouts`: one for each request, in batch order."""
        outcomes = Counter("rejected" if r.status == "rejected" else OUTCOMES[r.finish_reason] for r in rollouts)
        statuses = Counter(r.status for r in rollouts)
        counts = {
            "requested": len(rollouts),
            **{outcome: outcomes[outcome] for outcome in (*OUTCOMES.values(), "rejected")},
            "reused": reused,
            "reward_timeouts": statuses["reward_timeout"],
            "reward_errors": statuses["reward_error"],
        }
        batch = RolloutBatch.from_rollouts([r for r in rollouts if r.status not in NOT_TRAINED])
        return cls(batch, counts, times, notes)

    def without(self, rejected: Collection[int], notes: Sequence[str]) -> RolloutResult:
        """With the rollouts `rejected` (indices in the batch) counted as such and no longer in the batch."""
        counts = Counter(self.counts)
        for i in rejected:
            counts[OUTCOMES[self.batch.finish_reasons[i]]] -= 1
            counts["rejected"] += 1
        kept = np.setdiff1d(np.arange(len(self.batch.rollout_ids)), list(rejected)).astype(np.int64)
        return RolloutResult(self.batch.take(kept), dict(counts), self.times, [*self.notes, *notes])

    @classmethod
    def join(cls, results: Sequence[RolloutResult]) -> RolloutResult:
        """The parts of one step, at least one, in order."""
        counts, times = Counter(), Counter()
        for result in results:
            counts.update(result.counts)
            times.update(result.times)
        notes = [note for result in results for note in result.notes]
        return cls(RolloutBatch.join([r.batch for r in results]), dict(counts), dict(times), notes)


def group_id(step: int, position: int) -> str:
    """Names a dispatch: the prompt at `position` of step `step`'s batch."""
    return f"{step:06d}-{position:04d}"


def position_of(group: str) -> int:
    return int(group.rpartition("-")[2])


def rollout_id(group: str, index: int) -> str:
    return f"{group}-{index:03d}"


def check_request(prompts: Sequence[Prompt], counts: Sequence[int]) -> None:
    """Raises ValueError where counts and prompts do not fit or a prompt was not tokenized."""
    if len(prompts) != len(counts):
        raise ValueError(f"counts: {len(counts)} for {len(prompts)} prompts")
    for prompt in prompts:
        if not prompt.tokens:
            raise ValueError(f"prompt {prompt.prompt_id!r} has no tokens")
