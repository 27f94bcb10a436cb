"""What one step reports: the keys of metrics.jsonl. Fractions unless the name says otherwise; times in seconds.

`reward/` and `rollout/` are about all that was sampled, `policy/`, `rollout_correction/` and the logprob gap about what
was trained on, the gap about its tokens of the newest weights, and absent without any. `policy/grad_norm` and
`policy/loss` are means over the updates that had a gradient.

`moe/`, of a mixture of experts: its passes with the policy's weights (policy/routing.py).

Of each reward function: `reward/FUNCTION/mean` of its scores, where it gave any, and as shares of what was requested
its states. `agent/`, with an agent: means over the requested episodes (docs/agents.md). `time/generate`, `logprobs`,
`update`, `weight_sync`, `evaluate`, `save` and `other` (with a critic also its `values` and `critic`, its updates) add
up to `time/step`; evaluation and save are those after the previous step, and are no part of the throughput.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dynamo_megatron.algorithm.advantages import informative, overlong_penalty
from dynamo_megatron.algorithm.diversity import NGRAM, distinct_ngrams, unique_answers
from dynamo_megatron.algorithm.gae import explained_variance
from dynamo_megatron.algorithm.rollout_correction import mismatch
from dynamo_megatron.config import Config
from dynamo_megatron.rollout.result import KINDS
from dynamo_megatron.types import REWARD_STATES

if TYPE_CHECKING:
    from dynamo_megatron.algorithm.allocation import Allocation
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.rollout.result import RolloutResult
    from dynamo_megatron.tracking.phases import Clock
    from dynamo_megatron.types import RolloutBatch, TokenStats
    from dynamo_megatron.weight_sync.sync import SyncReport

NOT_IN_KEYS = re.compile(r"[^\w.:-]+")  # of a reward function's name: a URL has slashes, which divide keys
TIMED = ("generate", "logprobs", "update", "save", "evaluate")  # phases of a Clock; a weight sync has its report
SHARES = {"clip": "clipped", "clip_c": "clipped_dual", "damped": "damped", "boosted": "boosted"}  # counts of an update
OF_EPISODES = (
    *("turns", "segments", "branched", "history", "template", "tools"),
    *("limit_turns", "limit_tokens", "limit_context", "limit_size", "abandoned", "restarts"),
)


@dataclass(frozen=True)
class StepRecord:
    """What a step sampled, in one round or, under dynamic sampling and `sequential`, in several."""

    step: int
    allocations: list[Allocation]  # one a round
    origins: list[np.ndarray]  # of each round: `Round.origin`
    result: RolloutResult  # of all rounds, without what was rejected
    drawing: Mapping[str, float]  # metrics of the prompts' selection
    score_ratio: float | None = None  # of the baselines; None: the method has none from history
    version: int | None = None  # of the weights when a step that is sampled ahead was dispatched

    def allocation_rows(self) -> Iterator[dict[str, Any]]:
        """The lines of allocation.jsonl; those of a later round say which."""
        for number, allocation in enumerate(self.allocations):
            for row in allocation.rows():
                row |= {"round": number} if number else {}
                yield row if self.version is None else {**row, "version": self.version}

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each prompt that the step drew: its rollouts in all rounds, int64 [N]; whether it had earlier ones when it
        was drawn, bool [N]."""
        counts = np.concatenate([a.counts for a in self.allocations])
        history = np.concatenate([a.history for a in self.allocations])
        positions = np.concatenate(self.origins)
        _, first = np.unique(positions, return_index=True)
        return np.bincount(positions, counts).astype(np.int64), history[first]


def _mean(values) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def step_metrics(
    record: StepRecord,
    batch: TrainBatch,
    stats: TokenStats,
    updates: Sequence[Mapping[str, float]],
    fits: Sequence[Mapping[str, float]],
    synced: SyncReport,
    clock: Clock,
    config: Config,
) -> dict[str, float]:
    """All metrics of a step, plain numbers; those of an option only where it is on. `updates`: of the policy; `fits`:
    of the critic."""
    rollouts, sampled = batch.rollouts, record.result.batch
    counts, history = record.drawn()
    differs = informative(sampled.rewards, sampled.group_ids)
    differing, groups = len({sampled.group_ids[s] for s in np.flatnonzero(differs)}), len(set(sampled.group_ids))
    difference = stats.logprobs.numpy() - rollouts.engine_logprobs
    gap = np.abs(difference[rollouts.weight_versions == record.step - 1])
    apart = mismatch(difference, rollouts.response_lengths, config.algorithm.rollout_correction)
    times = _times(synced, clock)
    return {
        "step": record.step,
        **_sampled(record.result),
        "rollout/zero_variance_groups": 1 - differing / groups,
        "rollout/weight_version_min": int(sampled.weight_versions.min()) if len(sampled.weight_versions) else -1,
        "rollout/weight_version_max": int(sampled.weight_versions.max(initial=-1)),
        **({"rollout/logprob_gap_max": float(gap.max()), "rollout/logprob_gap_mean": _mean(gap)} if len(gap) else {}),
        **_of_servers(record.result),
        **{f"rollout_correction/{name}": value for name, value in apart.items()},
        "allocation/prompts": len(counts),
        "allocation/n_min": int(counts.min()),
        "allocation/n_max": int(counts.max()),
        "allocation/history_share": float(history.mean()),
        **record.drawing,
        **_of_policy(record.step, stats, updates, config),
        **_of_critic(record.step, batch, fits, config),
        "weight_sync/bytes": synced.bytes,
        "weight_sync/floor_bytes": synced.floor_bytes,
        **times,
        "throughput/tokens_per_second": len(sampled.tokens)
        / (times["time/step"] - times["time/save"] - times["time/evaluate"]),
        **_of_options(record, batch, differing, config),
        **_of_staleness(record, times["time/generate"]),
    }


def _sampled(result: RolloutResult) -> dict[str, float]:
    """What was sampled, with shares of the rollouts that were requested."""
    sampled, counts = result.batch, result.counts
    requested = max(1, counts["requested"])
    metrics = {
        "reward/mean": _mean(sampled.rewards),
        "reward/success": _mean(sampled.successes),
        "reward/timeouts": counts["reward_timeouts"] / requested,
        "reward/errors": counts["reward_errors"] / requested,
        "rollout/requested": counts["requested"],
        "rollout/response_tokens": int(np.sum(sampled.response_lengths)) + result.rejected_tokens,
        "rollout/response_length_mean": _mean(sampled.response_lengths),
        **_diversity(sampled),
    }
    for name in ("truncated", "aborted", "failed", "rejected", "reused"):
        metrics[f"rollout/{name}"] = counts[name] / requested
    for function, scores in sorted(result.rewards.items()):
        name, numbers = f"reward/{NOT_IN_KEYS.sub('_', function)}", [s for s in scores if not isinstance(s, str)]
        states = Counter(s if isinstance(s, str) else "scored" for s in scores)
        metrics |= {f"{name}/mean": _mean(numbers)} if numbers else {}
        metrics |= {f"{name}/{state}": states[state] / requested for state in REWARD_STATES}
    return metrics | {f"agent/{name}": result.episodes[name] / requested for name in OF_EPISODES if result.episodes}


def _diversity(sampled: RolloutBatch) -> dict[str, float]:
    """Means over the groups of two or more rollouts; absent where there are none."""
    metrics = {}
    if sampled.answers is not None and len(shares := unique_answers(sampled.answers, sampled.group_ids)):
        metrics["reward/unique_answers"] = _mean(shares)
    ngrams = distinct_ngrams(sampled.response_tokens, sampled.response_lengths, sampled.group_ids)
    return metrics | ({f"rollout/distinct_{NGRAM}grams": _mean(ngrams)} if len(ngrams) else {})


def _of_servers(result: RolloutResult) -> dict[str, float]:
    """Of each server SERVER `fleet/SERVER/`: `tokens_per_second`, `busy_share` (the share of the generation time with a
    request under way; both of the time since the step before if rollouts are generated ahead), `kv_cache` (the largest
    share in use that was seen; absent where it was not measured) and `rollouts` (how many it answered). Of all:
    requests that were lost with a server and sent again, and restarts."""
    seconds = max(1e-9, result.seconds if result.seconds_ahead is None else result.seconds_ahead)
    metrics = {
        "fleet/retries": sum(use.retries for use in result.uses.values()),
        "fleet/restarts": sum(use.restarts for use in result.uses.values()),
    }
    answered = Counter(outcome.server for outcome in result.outcomes.values())
    for name, use in sorted(result.uses.items()):
        if name:
            metrics[f"fleet/{name}/tokens_per_second"] = use.tokens / seconds
            metrics[f"fleet/{name}/busy_share"] = min(1.0, use.busy / seconds)
            if use.kv_cache is not None:
                metrics[f"fleet/{name}/kv_cache"] = use.kv_cache
            metrics[f"fleet/{name}/rollouts"] = answered[name]
    return metrics


def _of_policy(
    step: int, stats: TokenStats, updates: Sequence[Mapping[str, float]], config: Config
) -> dict[str, float]:
    """Shares are means over the tokens of the updates' sums, of what the method has; what a function of the user's
    clips is not counted."""
    with_gradient, tokens = [u for u in updates if not u["skipped"]], len(stats.entropy)
    loss = config.algorithm.loss
    of = {f"{name}_share": counted for name, counted in SHARES.items()} if loss.function is None else {}
    of |= {"selected_share": "selected"} if loss.selects else {}
    of |= {"kl": "kl"} if config.algorithm.kl.coef and any("kl" in u for u in updates) else {}  # not of skipped ones
    return {
        "policy/loss": _mean([u["loss"] for u in with_gradient]),
        "policy/entropy": float(stats.entropy.double().mean()) if tokens else 0.0,
        **{f"policy/{name}": sum(u.get(key, 0.0) for u in updates) / max(1, tokens) for name, key in of.items()},
        "policy/grad_norm": _mean([u["grad_norm"] for u in with_gradient]),
        "policy/skipped_updates": sum(u["skipped"] > 0 for u in updates),
        "policy/learning_rate": config.learning_rate(step),
        "policy/tokens": tokens,
    }


def _of_critic(step: int, batch: TrainBatch, fits: Sequence[Mapping[str, float]], config: Config) -> dict[str, float]:
    """Over the trained tokens, with the values that the step began with."""
    if (critic := config.of_critic) is None:
        return {}
    return {
        "critic/loss": _mean([f["loss"] for f in fits]),
        "critic/grad_norm": _mean([f["grad_norm"] for f in fits]),
        "critic/clip_share": sum(f["clipped"] for f in fits) / max(1, len(batch.values)),
        "critic/explained_variance": explained_variance(batch.values, batch.returns),
        "critic/value": _mean(batch.values),
        "critic/return": _mean(batch.returns),
        "critic/learning_rate": critic.learning_rate(step),
    }


def _times(synced: SyncReport, clock: Clock) -> dict[str, float]:
    timed = (*TIMED, *(name for name in ("values", "critic") if name in clock.seconds))
    seconds = {name: clock.seconds.get(name, 0.0) for name in timed} | {"weight_sync": synced.seconds}
    elapsed = clock.total
    return {
        "time/step": elapsed,
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/other": elapsed - sum(seconds.values()),
        "time/weight_sync_pause": synced.pause_seconds,
        "time/weight_sync_proof": synced.proof_seconds,
    }


def _of_options(record: StepRecord, batch: TrainBatch, differing: int, config: Config) -> dict[str, float]:
    """What an option that is on brings. `differing`: groups whose rewards differ."""
    algorithm, sampled, options = config.algorithm, record.result.batch, {}
    if (buffer := algorithm.advantage.overlong_buffer) is not None:
        most = algorithm.advantage.overlong_penalty
        penalties = overlong_penalty(sampled.response_lengths, config.rollout.max_new_tokens, buffer, most)
        options["reward/overlong_penalty"] = _mean(penalties)
    if algorithm.dynamic_sampling is not None:
        options["rollout/refill_rounds"] = len(record.allocations) - 1
        options["rollout/missing_groups"] = config.data.batch_prompts - differing
    if algorithm.sequential is not None:
        options["sequential/rounds"] = len(record.allocations)
        trained = len(batch.rollouts.rollout_ids)
        options["sequential/trained_share"] = trained / max(1, record.result.counts["requested"])
    if record.score_ratio is not None:
        options["advantage/score_ratio"] = record.score_ratio
    if batch.teacher_gap is not None:
        options["policy/teacher_kl"] = -_mean(batch.teacher_gap)  # an estimate of the reverse KL a token, nats
    # Of a rollout the sum over its steps or, of the reward `prime`, which only trained ones have, over its tokens.
    process = {"steps": (sampled, sampled.step_rewards), "prime": (batch.rollouts, batch.implicit_rewards)}
    for name, (rollouts, rewards) in process.items():
        if rewards is not None:
            options[f"reward/{name}"] = float(np.nansum(rewards)) / max(1, len(rollouts.rollout_ids))
    return options


def _of_staleness(record: StepRecord, waited: float) -> dict[str, float]:
    result = record.result
    if result.seconds_ahead is None:
        return {}
    versions, lengths = result.batch.weight_versions, result.batch.response_lengths
    staleness, counts = record.step - 1 - versions, result.counts
    starts = (np.cumsum(lengths) - lengths)[lengths > 0]
    lowest, highest = (f.reduceat(versions, starts) if len(starts) else starts for f in (np.minimum, np.maximum))
    return {
        "rollout/staleness_mean": _mean(staleness),
        "rollout/staleness_max": int(staleness.max(initial=0)),
        "rollout/mixed_versions": _mean(lowest != highest),
        "rollout/dropped": int(sum(a.counts.sum() for a in record.allocations)) - sum(counts[kind] for kind in KINDS),
        "fleet/idle_share": result.idle_share,
        "time/wait_rollouts": waited,
    }
