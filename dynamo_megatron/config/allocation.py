"""The sections of the configuration that say which prompts get how many rollouts. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dynamo_megatron.config.method import Positive, Section, built_in

ALLOCATORS = ("uniform", "waterfill", "neyman", "knapsack", "cero", "gvm", "cures")


class AllocationConfig(Section):
    of_kinds = {"cost": ("neyman",)}
    # uniform, waterfill, neyman, knapsack, cero, gvm, cures or module:Class
    kind: Annotated[str, built_in(ALLOCATORS)] = "neyman"
    budget: Positive | None = None  # rollouts a step; None: 8 a prompt
    rollout_n_min: Positive = 2
    rollout_n_max: Positive = 24
    initial_budget: Positive = 8
    half_life: Annotated[float, Field(gt=0)] = 8.0  # visits in which a rollout's weight halves; not waterfill, cero
    static: bool = False  # learn from a prompt's first visit alone
    # energy: of the gradient by the logits; empirical: of the rewards, not 0/1 alone
    variance: Literal["bernoulli", "surprise", "energy", "empirical"] = "bernoulli"
    cost: Literal["rollouts", "tokens"] = "rollouts"  # neyman: what is held to the budget; tokens: expected ones
    prior_by: str | None = None  # data column (dotted) or `source`: its values have a prior each; None: one for all
    variance_floor: Annotated[float, Field(ge=0)] = 0.2  # share of the batch's mean variance added to every prompt
    power: Literal["sigma", "sigma2"] = "sigma"  # waterfill: what the priority is
    on_shortfall: Literal["error", "clip", "scale"] = "error"  # a budget outside [N min, N max]

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.rollout_n_min > self.rollout_n_max:
            yield f"rollout_n_min: {self.rollout_n_min} is above rollout_n_max {self.rollout_n_max}"

    def fit(self, prompts: int, budget: int) -> tuple[int, int, int]:
        """(budget, rollout_n_min, rollout_n_max) for `prompts` prompts, with min * prompts <= budget <= max * prompts.

        A budget outside the bounds is an error, is clipped to them (`on_shortfall: clip`), or moves the bound that is
        in its way (`scale`). Raises ValueError.
        """
        low, high = self.rollout_n_min, self.rollout_n_max
        if prompts == 0 or prompts * low <= budget <= prompts * high:
            return budget if prompts else 0, low, high
        if self.on_shortfall == "clip":
            return min(max(budget, prompts * low), prompts * high), low, high
        if self.on_shortfall == "scale" and budget >= prompts:
            return budget, min(low, budget // prompts), max(high, -(-budget // prompts))
        raise ValueError(
            f"budget: {budget} rollouts for {prompts} prompts is outside [{prompts * low}, {prompts * high}] "
            "(data.batch_prompts times rollout_n_min and rollout_n_max); change one of them or set on_shortfall: clip"
        )


class DynamicSamplingConfig(Section):
    """Groups of equal rewards are replaced by those of further prompts (DAPO, arXiv 2503.14476)."""

    rounds: Positive = 4  # of replacement a step, at most


class SequentialConfig(Section):
    """Rounds of a step that look at its own outcomes, `round_n` rollouts of every prompt in the first."""

    of_kinds = {
        **dict.fromkeys(("lower", "upper", "explore"), ("pilot",)),
        **dict.fromkeys(("exit", "keep"), ("reinforce_ada",)),
    }
    # pilot (Pilot-Commit, arXiv 2605.26606): the rest of the budget to the prompts of middling success rates;
    # reinforce_ada (Reinforce-Ada, arXiv 2510.04996): rounds until a prompt has right and wrong rollouts
    kind: Literal["pilot", "reinforce_ada"] = "pilot"
    round_n: Positive = 8  # rollouts of a prompt in the first round; reinforce_ada: in every round
    lower: Annotated[float, Field(ge=0, le=1)] = 0.125  # pilot: least share of right rollouts for a second round
    upper: Annotated[float, Field(ge=0, le=1)] = 0.25  # pilot: least share of wrong ones
    # pilot: chance of a second round for a prompt without these; above 0: both rounds are groups of their own, with
    # weights that make the gradient unbiased
    explore: Annotated[float, Field(ge=0, le=1)] = 0.0
    exit: Literal["balanced", "positive"] = "balanced"  # reinforce_ada: keep / 2 right and wrong ones, or 1 right one
    keep: Annotated[int, Field(ge=2)] = 4  # reinforce_ada: rollouts of a prompt that are trained on

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.lower + self.upper > 1:
            yield f"lower: {self.lower:g} right and upper: {self.upper:g} wrong are more than 1; lower one"

    def faults_in(self, budget: int, prompts: int, low: int, high: int) -> Iterator[str]:
        """Why rounds do not fit a step of `budget` rollouts, `low` to `high` of each of `prompts`, one line each."""
        n = self.round_n
        if not low <= n <= high:
            yield f"round_n: {n} is outside allocation.rollout_n_min and rollout_n_max, {low} to {high}"
        elif self.kind == "reinforce_ada":
            if high % n:
                yield f"round_n: {n} does not divide allocation.rollout_n_max, {high}, the most that a prompt gets"
            if self.keep > n:
                yield f"keep: {self.keep} rollouts of a prompt, and a first round has {n}; raise round_n or lower keep"
        elif high - n < low:
            yield f"round_n: {n} leaves no second round of allocation.rollout_n_min {low} below rollout_n_max {high}"
        else:
            least = prompts * (n + low) if self.explore else prompts * n + low
            if budget < least:
                yield (
                    f"round_n: {n} rollouts for each of {prompts} prompts leave {max(0, budget - prompts * n)} of the "
                    f"budget of {budget}; give allocation.budget {least} or more"
                )
