"""Decides which rollouts of an interrupted run are used in place of new ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dynamo_megatron.rollout.client import Response
from dynamo_megatron.rollout.result import Outcome
from dynamo_megatron.types import NOT_TRAINED, Prompt, Rollout, RolloutBatch

UNSCORED = ("reward_timeout", "reward_error")  # statuses of rollouts whose reward function failed: reward 0
OTHER_VERSION = "of another weight version"


@dataclass
class Reuse:
    """By rollout_id: the rollouts `kept`, each as a batch of one, with their outcomes; those `discarded` (with the
    reason), and the partial responses `begun`, which are continued."""

    kept: dict[str, RolloutBatch] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    begun: dict[str, Response] = field(default_factory=dict)
    discarded: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        notes = []
        if self.kept:
            notes.append(f"{len(self.kept)} rollouts of an interrupted run are reused, with their rewards")
        if self.begun:
            notes.append(f"{len(self.begun)} responses that an interrupted run has begun are continued")
        if self.discarded:
            reasons = [f"{count} {why}" for why, count in sorted(Counter(self.discarded.values()).items())]
            notes.append(f"discarded rollouts of an interrupted run: {', '.join(reasons)}")
        return notes


def reusable(
    lines: Iterable[Rollout],
    wanted: Mapping[str, Prompt],
    groups: Collection[str],
    versions: range,
    max_new_tokens: int,
    continues: bool = False,
) -> Reuse:
    """Sorts the `lines` of `groups` of the step. Kept are the rollouts of the prompts `wanted` (by rollout_id) that
    weights of `versions` sampled. Of two lines with one rollout_id the later one counts. `continues`: of the other
    responses, the leading tokens that these weights sampled are kept as `begun`."""
    reuse = Reuse()
    for rollout in lines:
        if rollout.group_id not in groups:
            continue
        name = rollout.rollout_id
        why = _unwanted(rollout, wanted.get(name), versions, max_new_tokens)
        if why == "rejected":  # what its server sampled before is not the policy's either
            reuse.begun.pop(name, None)
        # An episode starts again.
        if (
            continues
            and rollout.episode is None
            and (why == OTHER_VERSION or (not why and rollout.status == "partial"))
        ):
            begun = _begun(rollout, versions)
            if len(begun.tokens) > len(reuse.begun[name].tokens if name in reuse.begun else ()):
                reuse.begun[name] = begun
        for earlier in (reuse.kept, reuse.outcomes, reuse.discarded):
            earlier.pop(name, None)
        if why or rollout.status == "partial":
            reuse.discarded[name] = why or OTHER_VERSION
        else:
            reuse.kept[name], reuse.outcomes[name] = RolloutBatch.from_rollouts([rollout]), Outcome.of(rollout)
    reuse.begun = {name: begun for name, begun in reuse.begun.items() if name not in reuse.kept}
    reuse.discarded = {name: why for name, why in reuse.discarded.items() if name not in reuse.begun}
    return reuse


def _begun(rollout: Rollout, versions: range) -> Response:
    """Returns the beginning of the response, up to the first token that was not sampled by weights in `versions`."""
    spans, prompt = [], rollout.response_mask.count(0)
    for span in rollout.weight_versions:
        if span[0] not in versions:
            break
        spans.append(span)
    end = spans[-1][2] if spans else 0
    tokens, routes = rollout.tokens[prompt : prompt + end], rollout.routes
    routes = None if routes is None else routes[: prompt + end]
    return Response(tokens, rollout.engine_logprobs[:end], spans, "abort", routes=routes)


def _unwanted(rollout: Rollout, prompt: Prompt | None, versions: range, max_new_tokens: int) -> str:
    """Returns why the rollout is not wanted; "" where it is. `prompt`: of the wanted rollout with its id."""
    if rollout.status in NOT_TRAINED:
        return rollout.status
    if rollout.status in UNSCORED:  # its user may have repaired the reward function
        return f"with reward 0 for a {rollout.status}"
    # An agent makes requests of its own.
    own = rollout.episode is not None or rollout.tokens[: rollout.response_mask.count(0)] == (prompt and prompt.tokens)
    if prompt is None or rollout.prompt_id != prompt.prompt_id or not own:
        return "of another prompt"
    if len(rollout.engine_logprobs) > max_new_tokens:
        return "of more than rollout.max_new_tokens"
    return OTHER_VERSION if any(v not in versions for v, _, _ in rollout.weight_versions) else ""
