"""The cases of benchmarks/head.py: shapes, inputs, the objective of every contender, and what float64 makes of it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dynamo_megatron.algorithm.losses import clipped_policy_loss
from dynamo_megatron.algorithm.modulation import ModulationRanges, entropy_change, modulate, modulation_ranges
from dynamo_megatron.config import ModulationConfig, PolicyLossConfig
from dynamo_megatron.kernels import token_stats

MODELS = {"7B": 3584, "14B": 5120}  # hidden size; the vocabulary is Qwen2.5's
VOCABULARY = {1: 152064, 2: 76032, 4: 38016, 8: 19072}  # columns of one rank at TP 1, 2, 4, 8
TOKENS = (4096, 8192, 16384, 32768)
MODULATION = ModulationConfig()
ACCURACY_TOKENS = 512  # the float64 reference has this many: its logits are not chunked


@dataclass(frozen=True)
class Case:
    """One shape. A shard of the vocabulary is benchmarked as a vocabulary of its size: no communication is in it."""

    name: str
    tokens: int
    hidden: int
    columns: int
    temperature: float = 1.0
    trained: float = 1.0  # share of the tokens with a label; the others are prompts or padding
    entropy_coef: float = 0.0
    peaked: bool = False

    @property
    def loss(self) -> PolicyLossConfig:
        """DynaMO's."""
        return PolicyLossConfig(clip_ratio_high=0.28, modulation=MODULATION, entropy_coef=self.entropy_coef)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def all_cases() -> list[Case]:
    """Every shape, and at 14B/8192 the variants of what is in the batch."""
    shapes = [
        Case(f"{model}/{tokens}/tp{tp}", tokens, hidden, columns)
        for model, hidden in MODELS.items()
        for tokens in TOKENS
        for tp, columns in VOCABULARY.items()
    ]
    return shapes + [v for c in shapes if c.name in ("14B/8192/tp1", "14B/8192/tp8") for v in variants(c)]


def tiny_cases() -> list[Case]:
    shape = Case("tiny", tokens=16, hidden=16, columns=300)
    return [shape, *variants(shape)]


def variants(case: Case) -> list[Case]:
    changes = {
        "peaked": {"peaked": True},
        "temperature 0.7": {"temperature": 0.7},
        "60 % trained": {"trained": 0.6},
        "entropy bonus": {"entropy_coef": 0.01},
    }
    return [dataclasses.replace(case, name=f"{case.name}/{name}", **change) for name, change in changes.items()]


@dataclass
class Inputs:
    """What a call gets. `weight` and `main_weight` are one memory; the latter has a float32 main_grad, as Megatron's.

    Tokens are [T]; `labels` is -100 where nothing is trained, and the float tensors are 0 there.
    """

    case: Case
    hidden: Tensor  # [T, h], a leaf
    weight: Tensor  # [columns, h], a leaf
    main_weight: Tensor
    labels: Tensor
    host_labels: Tensor  # as the policy hands them to its head
    advantages: Tensor
    old_logprobs: Tensor
    expected: Tensor  # E[pi Lambda], given to contenders that cannot compute it
    weights: Tensor
    ranges: ModulationRanges
    entropy: float  # nats, mean over the trained tokens

    def forget_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = self.main_weight.grad = None


def make_inputs(case: Case, device: torch.device, seed: int = 0, backend: str = "torch") -> Inputs:
    """Random logits of unit variance, or with `peaked` a label that most tokens are nearly sure of. Never zeros:
    a GPU multiplies zeros faster."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    weight = (randn(case.columns, case.hidden) / case.hidden**0.5).to(case.dtype)
    hidden = randn(case.tokens, case.hidden)
    labels = torch.randint(case.columns, (case.tokens,), generator=generator, device=device)
    if case.peaked:
        likely = weight[labels].float()
        # One token in eight is in doubt, as in a trained model's text; one label in ten is not the likeliest token.
        height = torch.where(rand(case.tokens) < 1 / 8, 14.0, 20.0)
        hidden += height[:, None] * likely / likely.square().sum(1, keepdim=True)
        labels = torch.where(rand(case.tokens) < 0.1, labels.roll(1), labels)
    labels = torch.where(rand(case.tokens) < case.trained, labels, -100)
    mask = labels != -100
    hidden = hidden.to(case.dtype)
    stats = token_stats(hidden, weight, labels, temperature=case.temperature, backend=backend)
    # Ratios well inside or well outside the clip: rounding then never decides a token's gradient.
    inside, outside = 0.2 * (rand(case.tokens) - 0.5), 0.5 * randn(case.tokens).sign()
    old = stats.logprobs + torch.where(rand(case.tokens) < 0.9, inside, outside)
    advantages = randn(case.tokens) * mask
    change = entropy_change(
        advantages, old, stats.entropy, old, mask, case.loss.clip_ratio_low, case.loss.clip_ratio_high, stats[2]
    )
    main_weight = weight.detach().requires_grad_()
    main_weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return Inputs(
        case=case,
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(),
        main_weight=main_weight,
        labels=labels,
        host_labels=labels.cpu(),
        advantages=advantages,
        old_logprobs=old * mask,
        expected=stats.expected_pi_lambda,
        weights=mask / mask.sum(),
        ranges=modulation_ranges(stats.entropy, change, mask),
        entropy=stats.entropy[mask].mean().item(),
    )


class Output(NamedTuple):
    """What a contender has come to, detached; None for what it does not give."""

    loss: Tensor | None = None
    logprobs: Tensor | None = None  # [T]
    entropy: Tensor | None = None
    hidden_grad: Tensor | None = None
    weight_grad: Tensor | None = None


def policy_objective(inputs: Inputs, logprobs: Tensor, entropy: Tensor, *, modulated: bool = True) -> Tensor:
    """sum_t w_t loss_t, differentiable, from a contender's own log-probabilities and entropy, [T]."""
    loss, mask = inputs.case.loss, inputs.labels != -100
    advantages, low, high = inputs.advantages, loss.clip_ratio_low, loss.clip_ratio_high
    if modulated:
        with torch.no_grad():
            change = entropy_change(
                advantages, logprobs, entropy, inputs.old_logprobs, mask, low, high, expected_pi_lambda=inputs.expected
            )
            m = {name: getattr(MODULATION, name) for name in ("alpha", "lambda_min", "gamma", "tau")}
            advantages = modulate(advantages, entropy, change, inputs.ranges, **m).advantages
    clipped = clipped_policy_loss(
        logprobs, inputs.old_logprobs, advantages, clip_ratio_low=low, clip_ratio_high=high
    ).loss
    if modulated and loss.entropy_coef:
        clipped = clipped - loss.entropy_coef * entropy
    return (inputs.weights * clipped)[mask].sum()


def in_float64(inputs: Inputs, target: str) -> Output:
    """The plain formula from the same hidden states and weight.

    `target`: "policy" (DynaMO's loss), "clipped" (without modulation and entropy bonus) or "statistics" (no loss).
    """
    hidden, weight = (t.detach().double().requires_grad_() for t in (inputs.hidden, inputs.weight))
    everywhere = (hidden @ weight.t() / inputs.case.temperature).log_softmax(-1)
    entropy = -(everywhere.exp() * everywhere).sum(-1)
    logprobs = everywhere.gather(1, inputs.labels.clamp(min=0)[:, None])[:, 0]
    if target == "statistics":
        return Output(None, logprobs.detach(), entropy.detach())
    loss = policy_objective(inputs, logprobs, entropy, modulated=target == "policy")
    loss.backward()
    return Output(loss.detach(), logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)


def errors(output: Output, exact: Output, labels: Tensor) -> dict[str, float]:
    """Largest absolute error of log-probabilities and entropy, relative ones of the loss and (Frobenius) gradients."""
    mask, found = labels != -100, {}
    for name in ("logprobs", "entropy"):
        if getattr(output, name) is not None:
            found[name] = (getattr(output, name) - getattr(exact, name))[mask].abs().max().item()
    for name in ("loss", "hidden_grad", "weight_grad"):
        if getattr(output, name) is not None:
            difference = getattr(output, name).double() - getattr(exact, name)
            found[name] = (torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(getattr(exact, name))).item()
    return found


@functools.cache
def accuracy_inputs(case: Case, device: torch.device) -> Inputs:
    return make_inputs(dataclasses.replace(case, tokens=min(case.tokens, ACCURACY_TOKENS)), device)
