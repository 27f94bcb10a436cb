"""The sections of the configuration that make a method: allocation, advantages, modulation, loss, correction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.dataclasses import dataclass

from dynamo_megatron.runtime.user_code import SPEC

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]  # of a wait: the system's own end at 24 days
EVALUATION = "evaluation"  # context of the validation: nothing is trained


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)
    of_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # option -> the kinds of the section that have it

    @model_validator(mode="after")
    def _whole(self, info: ValidationInfo) -> Section:
        kind = getattr(self, "kind", None)
        others = [name for name, kinds in self.of_kinds.items() if kind not in kinds]
        faults = [*self.unused(others, f"no option of kind {kind}"), *self.faults(training=info.context != EVALUATION)]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def faults(self, *, training: bool) -> Iterator[str]:
        """What is wrong with the section whose values are each valid, "key: why" each. `training`: else only the
        options of an evaluation are to fit."""
        yield from ()

    def unused(self, names: Iterable[str], why: str) -> Iterator[str]:
        """A fault for each of the options `names` that is not at its default and would do nothing."""
        for name in names:
            field = type(self).model_fields[name]
            if getattr(self, name) != (default := field.default):
                shown = default if isinstance(default, str) else json.dumps(default)
                yield f"{field.alias or name}: {why}; set it to {shown}"


class EntropyShapingConfig(Section):
    """A + min(alpha H, |A| / kappa) per token (arXiv 2506.14758)."""

    alpha: Annotated[float, Field(ge=0)] = 0.4
    kappa: Annotated[float, Field(gt=1)] = 2.0


class ProcessConfig(Section):
    """Of rewards of a response's steps, where there are any: A_t = A + weight * sum_{k >= t} gamma^(k-t) (r_k - b)."""

    weight: Annotated[float, Field(ge=0)] = 1.0  # of the return of process rewards beside the outcome's advantage
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount of a later step's reward, per token


GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce")
ADVANTAGES = (*GROUP_ADVANTAGES, "otb", "history", "gae")
LOSSES = ("clip", "cispo")


def built_in(names: tuple[str, ...]) -> AfterValidator:
    """Of one of `names`, or a function of the user's."""

    def known(value: str) -> str:
        if value not in names and not SPEC.fullmatch(value):
            raise ValueError(f"{value!r} is unknown; give {', '.join(names)} or module:function")
        return value

    return AfterValidator(known)


class AdvantageConfig(Section):
    of_kinds = {
        "singleton": (*GROUP_ADVANTAGES, "otb"),
        "eps": ("grpo",),
        "prior_strength": ("history",),
        **dict.fromkeys(("gamma", "lam", "steps"), ("gae",)),
    }
    # grpo, dr_grpo, rloo, reinforce, otb, history, gae (PPO's, from a critic) or module:function
    kind: Annotated[str, built_in(ADVANTAGES)] = "rloo"
    singleton: Literal["zero", "raw"] = "zero"
    eps: Annotated[float, Field(ge=0)] = 1e-6
    prior_strength: Annotated[float, Field(gt=0, le=16)] = 1.0  # history: rollouts that the pool's mean counts as
    # history: energy of wrong over right rollouts, of which the optimal baseline is made; auto: measured, and 1 if a
    # reward is outside [0, 1]; 1: the mean
    score_ratio: Literal["auto"] | Annotated[float, Field(gt=0)] = 1.0
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # gae: discount of a later step's reward
    lam: Annotated[float, Field(ge=0, le=1, alias="lambda")] = 0.95  # gae: 0 trusts the critic, 1 the rewards alone
    steps: Literal["auto", "tokens", "turns"] = "auto"  # gae: what gamma and lambda act between; auto: an agent's turns
    # batch: less the mean over the step's rollouts (SPO) or with gae its tokens, over their std
    normalise: Literal["none", "batch"] = "none"
    positive_weight: Annotated[float, Field(ge=0)] = 1.0  # positive advantages times this (W-REINFORCE: 0.1)
    overlong_buffer: Annotated[float, Field(gt=0, le=1)] | None = None  # DAPO: last share of max_new_tokens, penalised
    overlong_penalty: Annotated[float, Field(ge=0)] = 0.5  # at the limit; DAPO's 1 is for rewards of -1 and 1
    # How much more a right rollout counts whose answer or path is rare in its group (docs/methods.md); 0: off
    diversity: Annotated[float, Field(ge=0, le=1)] = 0.0
    process: ProcessConfig = ProcessConfig()
    entropy_shaping: EntropyShapingConfig | None = None

    def faults(self, *, training: bool) -> Iterator[str]:
        of_rollouts = {"otb": ("positive_weight", "normalise", "diversity"), "gae": ("positive_weight", "diversity")}
        why = f"is of a rollout's advantage, and those of kind {self.kind} are of tokens"
        yield from self.unused(of_rollouts.get(self.kind, ()), why)
        if self.normalise == "batch" and self.kind not in ("otb", "gae"):
            why = "normalise batch subtracts the batch mean afterwards: a wrong rollout may get a positive advantage"
            yield from self.unused(["positive_weight"], why)
        if self.kind == "gae" and self.process.gamma != 1:
            yield "process.gamma: kind gae discounts by its own gamma; set it to 1.0"
        if self.kind != "history" and self.score_ratio not in ("auto", 1):
            yield from self.unused(["score_ratio"], f"no option of kind {self.kind}")
        if self.overlong_buffer is None:
            yield from self.unused(["overlong_penalty"], "there is no overlong_buffer")
        elif self.kind in ("reinforce", "history"):
            yield f"overlong_buffer: its penalty is not in the rewards that kind {self.kind} is made for"

    @property
    def of_the_user(self) -> bool:
        """`kind` names a function of the user's."""
        return self.kind not in ADVANTAGES

    @property
    def needs_company(self) -> bool:
        """The only rollout of a group has the advantage 0."""
        return self.kind in ("grpo", "dr_grpo", "rloo", "otb") and self.singleton == "zero"


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ModulationConfig:
    """Token-level advantage modulation (arXiv 2602.19208); the defaults are the published `decay6`."""

    alpha: Annotated[float, Field(ge=0)] = 0.2
    lambda_min: Annotated[float, Field(ge=0, le=1)] = 0.6
    gamma: Annotated[float, Field(ge=0)] = 50.0
    tau: float = 0.99
    expectation: Literal["exact", "sequence_mean"] = "exact"
    scope: Literal["mini_batch", "micro_batch"] = "mini_batch"


Aggregation = Literal[
    "token_mean", "sequence_mean", "sequence_sum", "constant_length", "prompt_mean", "prompt_token_mean"
]
AGGREGATIONS = get_args(Aggregation)


class ClipCovConfig(Section):
    """No policy gradient on a few random tokens of large covariance (arXiv 2505.22617)."""

    ratio: Annotated[float, Field(gt=0, le=1)] = 2e-4  # share of the mini-batch's tokens
    low: float = 1.0  # the covariance of those to choose from
    high: float = 5.0

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low: {self.low} is not below high {self.high}"


class KLCovConfig(Section):
    """A KL penalty towards the old policy on the tokens of the largest covariance (arXiv 2505.22617)."""

    ratio: Annotated[float, Field(gt=0, le=1)] = 2e-3  # share of the mini-batch's tokens
    coef: Annotated[float, Field(gt=0)] = 1.0


# Options of the built-in losses alone. What acts on advantages and weights before the loss goes with any function.
BUILT_IN_LOSS = (
    "ratio", "old", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coef", "clip_cov", "kl_cov"
)  # fmt: skip


class LossConfig(Section):
    # clip, cispo (arXiv 2506.13585: the ratio, held to [1 - low, 1 + high], is a weight without gradient on the
    # logprob), or module:function, a loss of yours per token (docs/quickstart.md)
    kind: Annotated[str, built_in(LOSSES)] = "clip"
    # Between policy and old policy. sequence: one a response, the product of its tokens' ratios; sequence_mean: their
    # geometric mean (GSPO, arXiv 2507.18071)
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    # Whose logprobs the ratio divides by: the policy's at the start of the step, or the engine's when it sampled
    old: Literal["policy", "engine"] = "policy"
    clip_ratio_low: Annotated[float, Field(ge=0, le=1)] = 0.2  # 1: no lower clip
    clip_ratio_high: Annotated[float, Field(ge=0)] = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None  # dual clip; None: off
    aggregation: Aggregation = "prompt_mean"
    mini_batches: Positive = 1  # optimizer updates a step, cut on group boundaries
    entropy_coef: float = 0.0
    entropy_top_ratio: Annotated[float, Field(gt=0, le=1)] | None = None  # train this share, by entropy; None: all
    clip_cov: ClipCovConfig | None = None
    kl_cov: KLCovConfig | None = None

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.function is not None:
            yield from self.unused(BUILT_IN_LOSS, f"an option of the built-in losses, which {self.kind} is not given")
        if self.kind == "cispo" and self.clip_ratio_c is not None:
            yield f"clip_ratio_c: {self.clip_ratio_c:g} is a dual clip, which kind cispo lacks; set it to null"
        if self.kl_cov is not None and self.ratio != "token":
            yield f"kl_cov: is about the ratio of a token, and ratio is {self.ratio}; set ratio to token"

    @property
    def function(self) -> str | None:
        """The user's function that `kind` names; None for a built-in loss."""
        return None if self.kind in LOSSES else self.kind

    @property
    def selects(self) -> bool:
        """Some of the tokens are singled out."""
        return any(option is not None for option in (self.entropy_top_ratio, self.clip_cov, self.kl_cov))


class KLConfig(Section):
    coef: Annotated[float, Field(ge=0)] = 0.0
    # k3 is at most 10, without a gradient beyond (2.6 nats below the reference), as in verl's low_var_kl
    kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    # function: the user's loss has the term, with the coef that it is given
    where: Literal["loss", "function"] = "loss"
    reference: str | None = None  # folder of the reference policy, as model.path; None: model.path, the run's start

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.coef == 0:
            yield from self.unused(["reference"], "only a coef above 0 uses it")
            yield from self.unused(["where"], "function is about the KL term, which only a coef above 0 turns on")


class TeacherConfig(Section):
    """On-policy distillation (arXiv 2306.13649 with lambda 1): weight * (log p_teacher - log p_policy) is added to the
    advantage of each sampled token, the gradient of the reverse KL of the next token."""

    path: str  # folder of a model of the policy's shape, as model.path; or the URL of an SGLang server, of any size
    weight: Annotated[float, Field(gt=0)] = 1.0
    reward_weight: Annotated[float, Field(ge=0)] = 1.0  # times the advantages from rewards; 0: the teacher alone
    api_key_env: str | None = None  # a URL: environment variable with the key sent as Authorization: Bearer

    def faults(self, *, training: bool) -> Iterator[str]:
        if not self.is_url:
            yield from self.unused(["api_key_env"], "is for the URL of a server")

    @property
    def is_url(self) -> bool:
        return self.path.startswith(("http://", "https://"))


def loss_faults(loss: LossConfig, modulation: ModulationConfig | None, kl: KLConfig) -> Iterator[str]:
    """Which sections contradict each other."""
    if modulation is not None and loss.function is not None:
        kind = f"loss.kind {loss.kind}"
        yield f"modulation: is a part of the built-in loss, which {kind} takes the place of; set it to null"
    elif modulation is not None:
        for key, only in (("kind", "clip"), ("ratio", "token"), ("old", "policy")):
            if (value := getattr(loss, key)) != only:
                yield (
                    f"loss.{key}: {value} does not go with modulation, which is defined by {only}; set "
                    "algorithm.modulation to null"
                )
    if kl.where == "function" and loss.function is None:
        yield (
            "kl.where: function leaves the KL term to a function of yours, "
            f"and loss.kind {loss.kind} is none; set it to loss"
        )


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PolicyLossConfig:
    """What the policy head needs to know of the loss (DESIGN: losses, modulation, KL and entropy terms)."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = None
    modulation: ModulationConfig | None = None
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    entropy_coef: float = 0.0
    kind: Literal["clip", "cispo"] = "clip"


class RolloutCorrectionConfig(Section):
    """Importance weights exp(policy - engine logprob) on the token weights."""

    kind: Literal["truncate", "mask"] = "truncate"  # outside [low, high]: to the bound, or 0
    level: Literal["token", "sequence"] = "token"  # sequence: one weight a response, the product of its tokens'
    low: Annotated[float, Field(ge=0)] = 0.0
    high: Annotated[float, Field(gt=0)] = 2.0

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low: {self.low} is not below high {self.high}"


ALLOCATORS = ("uniform", "waterfill", "neyman", "knapsack", "gvm", "cures")


class AllocationConfig(Section):
    # uniform, waterfill, neyman, knapsack, gvm, cures or module:Class
    kind: Annotated[str, built_in(ALLOCATORS)] = "neyman"
    budget: Positive | None = None  # rollouts a step; None: 8 a prompt
    rollout_n_min: Positive = 2
    rollout_n_max: Positive = 24
    initial_budget: Positive = 8
    half_life: Annotated[float, Field(gt=0)] = 8.0  # visits in which a rollout's weight halves; not waterfill
    variance: Literal["bernoulli", "empirical"] = "bernoulli"  # empirical: of the rewards, not 0/1 alone
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

    of_kinds = {**dict.fromkeys(("lower", "upper"), ("pilot",)), "keep": ("reinforce_ada",)}
    # pilot (Pilot-Commit, arXiv 2605.26606): the rest of the budget to the prompts of middling success rates;
    # reinforce_ada (Reinforce-Ada, arXiv 2510.04996): rounds until a prompt has right and wrong rollouts
    kind: Literal["pilot", "reinforce_ada"] = "pilot"
    round_n: Positive = 8  # rollouts of a prompt in the first round; reinforce_ada: in every round
    lower: Annotated[float, Field(ge=0, le=1)] = 0.125  # pilot: least share of right rollouts for a second round
    upper: Annotated[float, Field(ge=0, le=1)] = 0.25  # pilot: least share of wrong ones
    # reinforce_ada: rollouts of a prompt that are trained on; with half of them right and half wrong it gets no more
    keep: Annotated[int, Field(ge=2)] = 4

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
        elif budget < (least := prompts * n + low):
            yield (
                f"round_n: {n} rollouts for each of {prompts} prompts leave {max(0, budget - prompts * n)} of the "
                f"budget of {budget}; give allocation.budget {least} or more"
            )
