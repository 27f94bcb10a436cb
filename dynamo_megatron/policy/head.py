"""The policy's head on the last stage: from hidden states to statistics and losses, with the kernels' fused head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dynamo_megatron import kernels
from dynamo_megatron.algorithm.losses import kl_estimate, response_log_ratios
from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.algorithm.rollout_correction import correction_weights, importance_ratios
from dynamo_megatron.algorithm.shaping import Shaped
from dynamo_megatron.algorithm.user_functions import LossInputs, custom_losses, load_loss
from dynamo_megatron.config import Config, PolicyLossConfig
from dynamo_megatron.kernels.self_check import check_backend
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.batch import MicroBatch, to_device
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel
from dynamo_megatron.types import TokenStats


class HeadLoss(NamedTuple):
    """The loss of one micro-batch."""

    loss: torch.Tensor  # scalar, whose backward pass gives the gradient of the model
    metrics: dict[str, torch.Tensor]  # sums; `broken`: tokens whose loss by the user's function is not finite
    stats: torch.Tensor | None = None  # [4, r], TokenStats of the rows; None: not asked for


LossOfHidden = Callable[[MicroBatch, torch.Tensor], HeadLoss]  # from a micro-batch and its hidden rows, [r, h]


# Values of all response tokens of a step, float32 [R] on the CPU, by their names in LossInputs, which describes them.
StepTokens = dict[str, torch.Tensor | None]


def _finite(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.isfinite(v) for v in values]).all(0)


class PolicyHead:
    """`chunk`: the last one of this rank. Its weight is read at every call: other models take its place."""

    def __init__(self, chunk: PolicyModel, spec: ModelSpec, config: Config, layout: Layout):
        self._chunk, self._vocabulary = chunk, spec.vocab_size
        self.config, self.layout = config, layout
        self.loss_config = config.policy_loss()
        self.loss_function = load_loss(function) if (function := config.algorithm.loss.function) else None

    def check(self) -> None:
        """Whether the kernels compute the run's loss right; raises ValueError."""
        config, head = self.config, {name: self.arguments[name] for name in ("backend", "temperature", "tp_group")}
        check_backend(
            self.weight,
            self.loss_config,
            gradient="recompute" if self.loss_function is not None else config.kernels.gradient,
            kl_cov=config.algorithm.loss.kl_cov is not None,
            response_ratio=config.algorithm.loss.ratio != "token",
            **head,
        )

    @property
    def weight(self) -> torch.Tensor:
        """[padded vocab / tp, h], on the last stage."""
        return self._chunk.head_weight

    @property
    def arguments(self) -> dict:
        """The arguments of all head functions besides the data."""
        return {
            "temperature": self.config.rollout.temperature,
            "vocab_size": self._vocabulary,
            "tp_group": self.layout.tp if self.layout.tp.size() > 1 else None,
            "backend": self.config.kernels.backend,
            "chunk_tokens": self.config.kernels.chunk_tokens,
        }

    def token_stats(self, hidden: torch.Tensor, labels: torch.Tensor, temperature: float | None = None) -> TokenStats:
        """Of rows [r, h]. `temperature` None: the rollouts' temperature."""
        arguments = self.arguments if temperature is None else {**self.arguments, "temperature": temperature}
        return kernels.token_stats(hidden, self.weight, labels, **arguments)

    def loss_of(self, tokens: StepTokens, shaped: Shaped, measures: bool) -> LossOfHidden | None:
        """The loss of a micro-batch, with the statistics of all rows if it `measures`; None if no token can give a
        gradient."""
        if self.loss_function is not None:
            return functools.partial(self._custom_loss, tokens)
        return self._fused_loss(tokens, shaped, measures)

    def _fused_loss(self, tokens: StepTokens, shaped: Shaped, measures: bool) -> LossOfHidden | None:
        """The built-in one."""
        loss, device = self.loss_config, self.layout.device
        every_token_counts, trained = bool(loss.kl_coef or loss.entropy_coef), shaped.trained
        if not (shaped.weights != 0 if every_token_counts else trained).any():
            return None
        ranges = shaped.ranges and ModulationRanges(*(to_device(r, device) for r in shaped.ranges))
        whole_sequences = loss.modulation is not None and (
            loss.modulation.scope == "micro_batch" or loss.modulation.expectation == "sequence_mean"
        )

        def policy_loss(micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
            slots, labels, every, log_ratios = micro_batch.slots, micro_batch.labels, hidden, None
            if tokens["old_logprobs"] is not None:
                log_ratios = self._response_log_ratios(micro_batch, hidden, tokens["old_logprobs"][slots])
            taken, rows, here = slice(None), slice(None), slots
            if not every_token_counts and not whole_sequences:
                taken = trained[slots].nonzero()[:, 0]  # tokens without gradient never reach the head's GEMM
                rows, here = to_device(taken, device), slots[taken]
                hidden = hidden[rows]
            names = ("advantages", "old_logprobs", "weights", "reference_logprobs")
            *constants, reference, old_kl_coef = (
                None if v is None else to_device(v[here], device)
                for v in (*(tokens[name] for name in names), shaped.old_kl_coef)
            )
            measured, correction = None, self.config.algorithm.rollout_correction
            if measures and correction is not None:
                measured = self.token_stats(every, labels)
                engine = to_device(tokens["engine_logprobs"][slots], device)
                gap, of_rows = measured.logprobs.double() - engine, self._responses(micro_batch)
                ratios = importance_ratios(gap, level=correction.level, **of_rows)
                constants[2] = constants[2] * correction_weights(ratios, correction)[rows].to(constants[2].dtype)
            output = kernels.policy_loss(
                hidden,
                self.weight,
                labels[taken],
                *constants,
                loss,
                ref_logprobs=reference,
                old_kl_coef=old_kl_coef,
                log_ratios=None if log_ratios is None else log_ratios[rows],
                ranges=ranges,
                cu_seqlens=micro_batch.response_bounds if whole_sequences else None,
                gradient=self.config.kernels.gradient,
                **self.arguments,
            )
            if not measures:
                return HeadLoss(output.loss, output.metrics)
            stats = torch.stack(output.stats if measured is None else measured)
            if stats.shape[1] < len(slots):
                left = (~trained[slots]).nonzero()[:, 0]
                others = to_device(left, device)
                rest = self.token_stats(every[others], labels[left])
                found = stats.new_empty(len(stats), len(slots))
                found[:, rows], found[:, others] = stats, torch.stack(rest)
                stats = found
            return HeadLoss(output.loss, output.metrics, stats)

        return policy_loss

    def _custom_loss(self, tokens: StepTokens, micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
        """The user's function's loss of all response tokens; it need not be 0 for tokens whose advantage is 0. Adds the
        KL term unless kl.where is `function`. Raises UserCodeError."""
        kl, slots = self.config.algorithm.kl, micro_batch.slots
        head = kernels.token_stats(hidden, self.weight, micro_batch.labels, **self.arguments, differentiable=True)
        logprobs = head.logprobs.detach().requires_grad_()
        here = {name: None if t is None else to_device(t[slots], logprobs.device) for name, t in tokens.items()}
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=head.entropy.detach(),
            response=micro_batch.response,
            kl_coef=kl.coef if kl.where == "function" else 0.0,
            **here,
        )
        given = _finite(*(v for v in vars(inputs).values() if isinstance(v, torch.Tensor)))
        weights, reference = inputs.weights.clone(), inputs.reference_logprobs
        loss = gradient = logprobs.detach()
        if len(loss):
            loss, gradient = custom_losses(self.loss_function, inputs)
        metrics = {"broken": (given & ~_finite(loss, gradient)).sum()}
        if reference is not None:
            with torch.enable_grad():
                estimate = kl_estimate(logprobs, reference, kl.kind)
                (slope,) = torch.autograd.grad((weights * estimate).sum(), logprobs)
            metrics["kl"] = estimate.detach().sum()
            if kl.where == "loss":
                loss, gradient = loss + kl.coef * estimate.detach(), gradient + kl.coef * slope
        metrics["loss"] = (weights * loss).sum().to(logprobs.dtype)
        # The value is metrics["loss"]; the derivative with respect to head.logprobs is `gradient`.
        return HeadLoss(metrics["loss"] + (gradient * (head.logprobs - logprobs.detach())).sum(), metrics)

    @torch.no_grad()
    def _response_log_ratios(
        self, micro_batch: MicroBatch, hidden: torch.Tensor, old_logprobs: torch.Tensor
    ) -> torch.Tensor | None:
        """[r] the log ratio of each row's response, over all context-parallel ranks; None with `loss.ratio: token`.

        One more pass through the head (a GEMM), since no token's loss is known before its whole response's logprobs.
        """
        ratio = self.config.algorithm.loss.ratio
        if ratio == "token":
            return None
        logprobs = self.token_stats(hidden, micro_batch.labels).logprobs
        difference = logprobs - to_device(old_logprobs, logprobs.device)
        return response_log_ratios(difference, ratio=ratio, **self._responses(micro_batch))

    def _responses(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The rows of each of the micro-batch's responses here, and what adds up over context-parallel ranks."""
        add_up = functools.partial(dist.all_reduce, group=self.layout.cp) if self.layout.cp.size() > 1 else None
        return {"lengths": micro_batch.response_bounds.diff().long(), "add_up": add_up}

    def cross_entropy(self, weights: torch.Tensor) -> LossOfHidden:
        """Of all response tokens, with `weights` float32 [R] on the CPU, at temperature 1."""

        def cross_entropy(micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
            weight = to_device(weights[micro_batch.slots], self.layout.device)
            # On-policy with an advantage of 1, the policy gradient is the cross-entropy's.
            constants = (torch.ones_like(weight), None, weight)
            options = {**self.arguments, "temperature": 1.0, "gradient": self.config.kernels.gradient}
            output = kernels.policy_loss(
                hidden, self.weight, micro_batch.labels, *constants, PolicyLossConfig(), **options
            )
            return HeadLoss(output.loss, {"loss": -(weight * output.stats.logprobs).sum()})

        return cross_entropy
