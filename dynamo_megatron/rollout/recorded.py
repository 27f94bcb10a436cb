"""Rollouts of an earlier run in place of a server: for replay, debugging, and runs that must repeat bit for bit."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import RolloutResult, group_id, rollout_id
from dynamo_megatron.rollout.store import read_groups, step_file
from dynamo_megatron.rollout.worker import OnCount, OnPoll
from dynamo_megatron.types import Prompt, Rollout


class RecordedRollouts:
    """Samples as `RolloutWorker` does, with rollouts from the `rollouts/` of the run in `folder`. Writes nothing.

    The k-th occurrence of a prompt in a step gets the first n rollouts of the k-th group recorded for it in that step.
    Rewards are the recorded ones. `vocab_size`: token ids are below it. Raises ValueError where `folder` has
    no rollouts/.
    """

    def __init__(self, folder: str | os.PathLike, vocab_size: int):
        self._folder, self._vocab_size = Path(folder), vocab_size
        self._seen: dict[str, int] = defaultdict(int)  # groups taken of each prompt in the step under way
        self._dispatched: dict[tuple[int, int], tuple[list[Prompt], list[int]]] = {}
        if not (self._folder / "rollouts").is_dir():
            raise InputError(f"rollout.recorded: {self._folder} has no rollouts/ folder; name the output_dir of a run")

    def reject(self, step: int, rollout_ids: Sequence[str], on_poll: OnPoll = None) -> None:
        """Does nothing: the record stays as it is, and a replay of it rejects these rollouts again."""

    def dispatch(
        self, step: int, prompts: Sequence[Prompt], counts: Sequence[int], on_poll: OnPoll = None, first: int = 0
    ) -> None:
        self._dispatched[step, first] = list(prompts), list(counts)

    def collect(self, step: int, on_poll: OnPoll = None, on_count: OnCount = None, first: int = 0) -> RolloutResult:
        """Raises ValueError that names the step, prompt or group that was not recorded, the group that is too small, or
        the rollout of another prompt than the data's or with unknown token ids (path: id: why)."""
        started, (prompts, counts) = time.monotonic(), self._dispatched.pop((step, first))
        path = step_file(self._folder, step)
        if not path.exists():
            raise InputError(f"rollout.recorded: step {step} was not recorded ({path} is missing)")
        groups = read_groups(path)
        if first == 0:
            self._seen.clear()
        rollouts: list[Rollout] = []
        for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first):
            recorded, number = groups.get(prompt.prompt_id, []), self._seen[prompt.prompt_id]
            self._seen[prompt.prompt_id] += 1
            group = recorded[number] if number < len(recorded) else []
            if len(group) < n:
                raise InputError(
                    f"{path}: prompt {prompt.prompt_id!r} has {len(group)} recorded rollouts in its group {number + 1} "
                    f"of {len(recorded)}, {n} were asked for"
                )
            name = group_id(step, position)
            for index, rollout in enumerate(group[:n]):
                own = rollout.tokens[: rollout.response_mask.count(0)]
                if rollout.episode is None and prompt.tokens not in (None, own):  # an agent makes requests of its own
                    raise InputError(
                        f"{path}: {rollout.rollout_id}: it is of other tokens of prompt {prompt.prompt_id!r}; "
                        "tokenizer, template or data have changed"
                    )
                if not all(0 <= token < self._vocab_size for token in rollout.tokens):
                    raise InputError(f"{path}: {rollout.rollout_id}: a token id that is not in the vocabulary")
                rollouts.append(dataclasses.replace(rollout, group_id=name, rollout_id=rollout_id(name, index)))
        return RolloutResult.from_rollouts(rollouts, time.monotonic() - started, [])
