"""Decides which rollouts of an interrupted run are used in place of new ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.result import Outcome
from dynamo_megatron.rollout.validation import identity_fault, rollout_fault
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout, RolloutBatch

UNSCORED = ("reward_timeout", "reward_error")  # statuses of rollouts whose reward function failed: reward 0
DAMAGED, OTHER_VERSION = "damaged", "of another weight version"


@dataclass
class Reuse:
    """By rollout_id: the rollouts `kept`, each as a batch of one, with their outcomes; those `discarded` (with the
    reason), and the partial responses `begun`, which are continued. `damage`: what is wrong with the first damaged
    rollout."""

    kept: dict[str, RolloutBatch] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    begun: dict[str, Response] = field(default_factory=dict)
    discarded: dict[str, str] = field(default_factory=dict)
    damage: str = ""

    def notes(self, file: Path) -> list[str]:
        """Returns lines for the user; `file` is where the rollouts are."""
        notes = []
        if self.kept:
            notes.append(f"{len(self.kept)} rollouts of an interrupted run are reused, with their rewards")
        if self.begun:
            notes.append(f"{len(self.begun)} responses that an interrupted run has begun are continued")
        if self.discarded:
            counts = sorted(Counter(self.discarded.values()).items())
            reasons = [f"{count} {why}" for why, count in counts]
            where = f" (the first in {file}, {self.damage})" if self.damage else ""
            notes.append(f"discarded rollouts of an interrupted run: {', '.join(reasons)}{where}")
        return notes


def reusable(
    lines: Iterable[Rollout],
    wanted: Mapping[str, Prompt],
    groups: Collection[str],
    versions: range,
    vocab_size: int,
    max_new_tokens: int,
    continues: bool = False,
) -> Reuse:
    """Sorts the `lines` of `groups` of the step. Kept are the valid rollouts of the prompts `wanted` (by rollout_id)
    that weights of `versions` sampled. Of two lines with one rollout_id the later one counts. `continues`: of the other
    responses, the leading tokens that these weights sampled are kept as `begun`."""
    reuse = Reuse()
    for rollout in lines:
        name, damage = str(rollout.rollout_id), identity_fault(rollout)
        if not damage and rollout.group_id not in groups:
            continue
        why = DAMAGED if damage else _unwanted(rollout, wanted)
        if not why:
            complete = replace(rollout, finish_reason="length") if rollout.status == "partial" else rollout
            damage = rollout_fault(complete, vocab_size=vocab_size, max_new_tokens=max_new_tokens)
            why = DAMAGED if damage else _of_others(rollout, wanted[name], versions)
        reuse.damage = reuse.damage or (damage and f"{on_one_line(name, 80)}: {damage}")
        reuse.kept.pop(name, None)
        reuse.discarded.pop(name, None)
        if why == "rejected":  # what its server sampled before is not the policy's either
            reuse.begun.pop(name, None)
        goes_on = continues and rollout.episode is None  # an episode starts again
        if why in ("", OTHER_VERSION) and goes_on and (why or rollout.status == "partial"):
            begun = _begun(rollout, versions)
            if name not in reuse.begun or len(begun.tokens) > len(reuse.begun[name].tokens):
                reuse.begun[name] = begun
        elif why or rollout.status == "partial":
            reuse.discarded[name] = why or OTHER_VERSION
        else:
            reuse.kept[name], reuse.outcomes[name] = RolloutBatch.from_rollouts([rollout]), Outcome.of(rollout)
    for name, response in list(reuse.begun.items()):
        if name in reuse.kept or not response.tokens:
            del reuse.begun[name]
            if name not in reuse.kept:
                reuse.discarded[name] = OTHER_VERSION
    reuse.outcomes = {name: outcome for name, outcome in reuse.outcomes.items() if name in reuse.kept}
    return reuse


def _begun(rollout: Rollout, versions: range) -> Response:
    """Returns the beginning of the response, up to the first token that was not sampled by weights in `versions`."""
    spans, prompt = [], rollout.response_mask.count(0)
    for span in rollout.weight_versions:
        if span[0] not in versions:
            break
        spans.append(span)
    end = spans[-1][2] if spans else 0
    return Response(rollout.tokens[prompt : prompt + end], rollout.engine_logprobs[:end], spans, "abort")


def _unwanted(rollout: Rollout, wanted: Mapping[str, Prompt]) -> str:
    """Returns why the rollout is not wanted, whatever its tokens are; "" where it is wanted."""
    if rollout.status in NOT_TRAINED:
        return rollout.status
    if rollout.status in UNSCORED:  # its user may have repaired the reward function
        return f"with reward 0 for a {rollout.status}"
    return "" if rollout.rollout_id in wanted else "of another prompt"


def _of_others(rollout: Rollout, prompt: Prompt, versions: range) -> str:
    tokens = rollout.tokens[: rollout.response_mask.count(0)]
    same = rollout.episode is not None or tokens == prompt.tokens  # an agent makes requests of its own
    if rollout.prompt_id != prompt.prompt_id or not same:
        return "of another prompt"
    return OTHER_VERSION if any(v not in versions for v, _, _ in rollout.weight_versions) else ""
