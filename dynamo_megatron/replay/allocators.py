"""The allocators of `dynamo-megatron replay --allocator KIND[,key=value...]`."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.replay.recording import Recording


def base_allocator(recording: Recording) -> AllocationConfig:
    """The run's own allocator; for the dump of another trainer the defaults. Raises ConfigError."""
    return _allocation(recording, [])


def parse_allocator(text: str, recording: Recording) -> AllocationConfig:
    """`text`: keys of algorithm.allocation, separated by commas; a first word without "=" is the kind.

    Keys that are not set have the values of `base_allocator`. Raises ConfigError for an unknown key or kind, and for a
    budget, because every allocator gets the step's budget.
    """
    kind, *rest = text.split(",")
    words = [kind if "=" in kind else f"kind={kind}", *rest]
    if words[0].startswith("kind=") and words[0] != "kind=neyman":
        words.insert(0, "cost=rollouts")  # the run's cost may be tokens, which only neyman supports
    if any(word.startswith("budget=") for word in words):
        raise ConfigError(f"--allocator {text}: a replay gives every allocator the budget that the step had")
    return _allocation(recording, words)


def _allocation(recording: Recording, words: Sequence[str]) -> AllocationConfig:
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
