"""The allocators of a replay, the counts that they would have given, and measures of them: functions of a record.

A visit is a dispatch of a prompt in a step. There are V visits, in the order of steps and batches. p is the success
rate of a visit's prompt over the whole record. It is known only afterwards, and averages over a policy that changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.replay.recording import RecordedStep, Recording


def allocator_of(recording: Recording, text: str = "") -> AllocationConfig:
    """The run's own allocator, for the dump of another trainer the defaults, with the keys of `text` (`--allocator`):
    keys of algorithm.allocation, separated by commas; a first word without "=" is the kind.

    Raises ConfigError for an unknown key or kind, and for a budget, because every allocator gets the step's budget.
    """
    kind, *words = text.split(",")
    if kind:
        words.insert(0, kind if "=" in kind else f"kind={kind}")
        if words[0].startswith("kind=") and words[0] != "kind=neyman":
            words.insert(0, "cost=rollouts")  # the run's cost may be tokens, which only neyman supports
    if any(word.startswith("budget=") for word in words):
        raise ConfigError(f"--allocator {text}: a replay gives every allocator the budget that the step had")
    tree = {
        "model": {"path": "none"},
        "data": {"source": "none", "batch_prompts": len(recording.steps[0].prompt_ids)},
        "output_dir": str(recording.folder),
        # A replay computes no advantages, so groups of one are allowed.
        "algorithm": {"allocation": recording.allocation, "advantage": {"kind": "history"}},
    }
    config, _ = compose([], [f"algorithm.allocation.{word}" for word in words], tree)
    allocation = config.algorithm.allocation
    if allocation.prior_by not in (None, recording.allocation.get("prior_by")):
        raise ConfigError(f"prior_by: the record does not say what {allocation.prior_by!r} is of its prompts")
    return allocation


def replay(
    steps: Sequence[RecordedStep], config: AllocationConfig, strata: Mapping[str, Hashable] | None = None
) -> np.ndarray:
    """Rollouts for every visit, int64 [V], by an allocator that observes the record as in training.

    Before a step the allocator has observed the rollouts of the earlier steps; if the run sampled ahead, of the steps
    that were trained on by then. It observes what was sampled, even where it would have requested other counts. Its
    budget is the step's. `strata` and errors: as for `RolloutAllocator`.
    """
    allocator, counts, observed = RolloutAllocator(config, strata), [], 0
    for index, step in enumerate(steps):
        while observed < index and (step.version is None or steps[observed].step <= step.version):
            seen = steps[observed]
            ids = [seen.prompt_ids[i] for i in seen.dispatch]
            allocator.observe(ids, seen.rewards, seen.successes, seen.step, seen.energy, seen.lengths)
            observed += 1
        counts.append(allocator.allocate(step.prompt_ids, step.budget, step=step.step))
    return np.concatenate(counts)


def given(steps: Sequence[RecordedStep]) -> np.ndarray:
    """The recorded count of every visit, int64 [V]."""
    return np.concatenate([step.given for step in steps])


def first_difference(steps: Sequence[RecordedStep], counts: np.ndarray) -> tuple[int, str, int, int] | None:
    """(step, prompt_id, recorded count, other count) of the first visit whose recorded count differs from `counts`,
    int64 [V]; None where there is none."""
    visits = ((step.step, prompt_id) for step in steps for prompt_id in step.prompt_ids)
    pairs = zip(visits, given(steps).tolist(), counts.tolist(), strict=True)
    return next(((*visit, ours, other) for visit, ours, other in pairs if ours != other), None)


def success_rates(steps: Sequence[RecordedStep]) -> np.ndarray:
    """p of every visit, float64 [V]. A prompt without rollouts gets the rate of all rollouts."""
    trials: Counter[str] = Counter()
    won: Counter[str] = Counter()
    for step in steps:
        for i, success in zip(step.dispatch, step.successes, strict=True):
            trials[step.prompt_ids[i]] += 1
            won[step.prompt_ids[i]] += int(success)
    overall = won.total() / max(trials.total(), 1)
    return np.array([won[i] / trials[i] if trials[i] else overall for step in steps for i in step.prompt_ids])
