"""The sections of the configuration that say which prompts get how many rollouts. Without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from dynamo_megatron.config.method import Positive, Section
from dynamo_megatron.runtime.user_code import SPEC

ALLOCATORS = ("uniform", "waterfill", "neyman")


class AllocationConfig(Section):
    kind: str = "neyman"  # uniform, waterfill, neyman or module:Class
    budget: Positive | None = None  # rollouts a step; None: 8 a prompt
    rollout_n_min: Positive = 2
    rollout_n_max: Positive = 24
    initial_budget: Positive = 8
    half_life: Annotated[float, Field(gt=0)] = 8.0  # visits after which an observation counts half (neyman)
    static: bool = False  # learn from a prompt's first visit alone
    variance: Literal["bernoulli", "surprise", "empirical"] = "bernoulli"  # empirical: of the rewards, not 0/1 alone
    prior_by: str | None = None  # data column (dotted) or `source`: its values have a prior each; None: one for all
    variance_floor: Annotated[float, Field(ge=0)] = 0.2  # share of the batch's mean variance added to every prompt
    power: Literal["sigma", "sigma2"] = "sigma"  # waterfill: what the priority is
    on_shortfall: Literal["error", "clip", "scale"] = "error"  # a budget outside [N min, N max]

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ALLOCATORS and not SPEC.fullmatch(value):
            raise ValueError(f"{value!r} is unknown; give {', '.join(ALLOCATORS)} or module:Class")
        return value

    @model_validator(mode="after")
    def _bounds(self) -> AllocationConfig:
        if self.rollout_n_min > self.rollout_n_max:
            raise ValueError(f"rollout_n_min: {self.rollout_n_min} is above rollout_n_max {self.rollout_n_max}")
        return self

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
