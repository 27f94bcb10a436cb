"""Rollouts of an earlier run in place of a server: for replay, debugging, and runs that must repeat bit for bit."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import OUTCOMES, RolloutResult, group_id, rollout_id
from dynamo_megatron.rollout.store import read_groups, step_file
from dynamo_megatron.rollout.validation import rollout_fault
from dynamo_megatron.rollout.worker import OnCount, OnPoll
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout


class RecordedRollouts:
    """Samples as `RolloutWorker` does, with rollouts from the `rollouts/` of the run in `folder`. Writes nothing.

    The k-th occurrence of a prompt in a step gets the first n rollouts of the k-th group recorded for it in that step.
    Rewards are the recorded ones. `vocab_size`, `max_new_tokens`: limits that every rollout is checked against, since
    the folder may be untrusted. Raises ValueError where `folder` has no rollouts/.
    """

    def __init__(self, folder: str | os.PathLike, *, vocab_size: int, max_new_tokens: int):
        self._folder = Path(folder)
        self._vocab_size, self._max_new_tokens = vocab_size, max_new_tokens
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
        the damaged rollout (path: id: why)."""
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
                if fault := self._fault(rollout, prompt):
                    raise InputError(f"{path}: {rollout.rollout_id}: {fault}")
                rollouts.append(dataclasses.replace(rollout, group_id=name, rollout_id=rollout_id(name, index)))
        return RolloutResult.from_rollouts(rollouts, {"generate": time.monotonic() - started}, [])

    def _fault(self, rollout: Rollout, prompt: Prompt) -> str:
        """Returns, in a few words, why a rollout cannot be used for `prompt`; "" where it can."""
        own = rollout.tokens[: rollout.response_mask.count(0)]
        if rollout.episode is None and prompt.tokens not in (None, own):  # an agent makes requests of its own
            return f"it is of other tokens of prompt {prompt.prompt_id!r}; tokenizer, template or data have changed"
        if rollout.status in NOT_TRAINED:  # it is only counted
            finish = rollout.finish_reason
            return "" if finish in OUTCOMES else f"finish reason {on_one_line(finish, 40)}"
        # NaN may be what a server had sent: the training rejects such a rollout and goes on.
        logprobs = [0.0 if math.isnan(p) else p for p in rollout.engine_logprobs]
        return rollout_fault(
            dataclasses.replace(rollout, engine_logprobs=logprobs),
            vocab_size=self._vocab_size,
            max_new_tokens=self._max_new_tokens,
        )
