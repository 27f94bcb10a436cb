"""Which rollouts of an interrupted run stand for those that are wanted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_megatron.rollout.result import Accounted, position_of
from dynamo_megatron.rollout.validation import identity_fault, rollout_fault
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout

UNSCORED = ("reward_timeout", "reward_error")  # statuses of rollouts whose reward function failed: reward 0
DAMAGED = "damaged"


@dataclass
class Reuse:
    """`kept` and `discarded` (why) by rollout_id; `damage`: what is wrong with the first one that is damaged."""

    kept: dict[str, Accounted] = field(default_factory=dict)
    discarded: dict[str, str] = field(default_factory=dict)
    damage: str = ""

    def notes(self, file: Path) -> list[str]:
        """Lines for the user; `file` is where the rollouts are."""
        notes = []
        if self.kept:
            notes.append(f"{len(self.kept)} rollouts of an interrupted run are reused, with their rewards")
        if self.discarded:
            counts = sorted(Counter(self.discarded.values()).items())
            reasons = [f"{count} {why}" for why, count in counts]
            where = f" (the first in {file}, {self.damage})" if self.damage else ""
            notes.append(f"discarded rollouts of an interrupted run: {', '.join(reasons)}{where}")
        return notes


def reusable(
    lines: Iterable[Rollout],
    wanted: Mapping[str, Prompt],
    positions: range,
    version: int,
    vocab_size: int,
    max_new_tokens: int,
) -> Reuse:
    """Of `lines` those at `positions` of the step: kept are the sound ones of the prompts `wanted` (by rollout_id) that
    weights of `version` sampled. Of two lines with one rollout_id the later one counts."""
    reuse = Reuse()
    for rollout in lines:
        name, damage = str(rollout.rollout_id), identity_fault(rollout)
        if not damage and position_of(rollout.group_id) not in positions:
            continue
        why = DAMAGED if damage else _unwanted(rollout, wanted)
        if not why:
            damage = rollout_fault(rollout, vocab_size=vocab_size, max_new_tokens=max_new_tokens)
            why = DAMAGED if damage else _of_others(rollout, wanted[name], version)
        reuse.damage = reuse.damage or (damage and f"{on_one_line(name, 80)}: {damage}")
        reuse.kept.pop(name, None)
        reuse.discarded.pop(name, None)
        if why:
            reuse.discarded[name] = why
        else:
            reuse.kept[name] = Accounted.of(rollout)
    return reuse


def _unwanted(rollout: Rollout, wanted: Mapping[str, Prompt]) -> str:
    """Why not, whatever the rollout holds; "" where it is wanted."""
    if rollout.status in NOT_TRAINED:
        return rollout.status
    if rollout.status in UNSCORED:  # its user may have repaired the reward function
        return f"with reward 0 for a {rollout.status}"
    return "" if rollout.rollout_id in wanted else "of another prompt"


def _of_others(rollout: Rollout, prompt: Prompt, version: int) -> str:
    tokens = rollout.tokens[: rollout.response_mask.count(0)]
    if rollout.prompt_id != prompt.prompt_id or tokens != prompt.tokens:
        return "of another prompt"
    if any(v != version for v, _, _ in rollout.weight_versions):
        return "of another weight version"
    return ""
