"""The allocators of `dynamo-megatron replay --allocator KIND[,key=value...]`."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.config import AllocationConfig
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.replay.recording import Recording


def base_allocator(recording: Recording) -> AllocationConfig:
    """A run's own allocator, or for the dump of another trainer the defaults. Raises ConfigError."""
    return _allocation(recording, [])


def parse_allocator(text: str, recording: Recording) -> AllocationConfig:
    """`text`: keys of algorithm.allocation with a comma between them; a first word without "=" is the kind.

    Keys that are not set are `base_allocator`'s. Raises ConfigError for an unknown key or kind, and for a budget:
    every allocator has the step's.
    """
    kind, *rest = text.split(",")
    words = [kind if "=" in kind else f"kind={kind}", *rest]
    if any(word.startswith("budget=") for word in words):
        raise ConfigError(f"--allocator {text}: a replay gives every allocator the budget that the step had")
    return _allocation(recording, words)


def _allocation(recording: Recording, words: Sequence[str]) -> AllocationConfig:
    tree = {
        "model": {"path": "none"},
        "data": {"source": "none", "batch_prompts": len(recording.steps[0].prompt_ids)},
        "output_dir": str(recording.folder),
        # No advantages are made here: a group of one is as good as any.
        "algorithm": {"allocation": recording.allocation, "advantage": {"kind": "history"}},
    }
    config, _ = compose([], [f"algorithm.allocation.{word}" for word in words], tree)
    allocation = config.algorithm.allocation
    if allocation.prior_by not in (None, recording.allocation.get("prior_by")):
        raise ConfigError(f"prior_by: the record does not say what {allocation.prior_by!r} is of its prompts")
    return allocation
