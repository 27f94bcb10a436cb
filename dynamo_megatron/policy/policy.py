"""The policy on every rank: token statistics and updates through Megatron's pipeline schedules.

Gradient scaling: the loss of a micro-batch is `sum_t w_t loss_t` with weights normalised over the whole mini-batch, so
the gradients of micro-batches and data-parallel ranks are only added. With `calculate_per_token_loss` and a token count
of 0 Megatron does not scale them: the upstream gradient of every micro-batch is exactly 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynamo_megatron import kernels
from dynamo_megatron.algorithm.losses import kl_estimate, response_log_ratios
from dynamo_megatron.algorithm.modulation import ModulationRanges
from dynamo_megatron.algorithm.rollout_correction import correction_weights, importance_ratios
from dynamo_megatron.algorithm.shaping import Shaped, shape_tokens
from dynamo_megatron.algorithm.user_functions import LossInputs, custom_losses, load_loss
from dynamo_megatron.checkpoint.weights import model_digest
from dynamo_megatron.config import Config, PolicyLossConfig
from dynamo_megatron.kernels.self_check import check_backend, check_layers
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import is_finite
from dynamo_megatron.policy.batch import (
    MicroBatch,
    MiniBatch,
    SequenceCost,
    TrainBatch,
    assign_micro_batches,
    to_device,
)
from dynamo_megatron.policy.frozen_models import FrozenModels
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.lora import add_adapters
from dynamo_megatron.policy.model import PolicyModel, build_chunks
from dynamo_megatron.policy.non_finite import NonFiniteError, PassInputs, broken_weights
from dynamo_megatron.policy.optimizer import build_optimizer, optimizer_step, wrap
from dynamo_megatron.policy.spikes import Spikes
from dynamo_megatron.types import Sequences, TokenStats

Measured = tuple[torch.Tensor, torch.Tensor]  # slots of tokens, on the CPU, and their statistics, [4, r] on the device


class HeadLoss(NamedTuple):
    """The loss of one micro-batch."""

    loss: torch.Tensor  # scalar, whose backward pass gives the gradient of the model
    metrics: dict[str, torch.Tensor]  # sums; `broken`: tokens whose loss by the user's function is not finite
    stats: torch.Tensor | None = None  # [4, r], TokenStats of the rows; None: not asked for


Build = Callable[[ModelSpec, Config, Layout], list[PolicyModel]]
LossOfHidden = Callable[[MicroBatch, torch.Tensor], HeadLoss]  # from a micro-batch and its hidden rows, [r, h]


class Gradient(NamedTuple):
    """The gradient of a mini-batch, in the policy's gradient buffers, before the optimizer's step."""

    inputs: PassInputs
    found: dict[str, float]  # what `Policy.update` returns; `skipped` 1: there is no gradient
    stats: TokenStats | None = None  # of the same forward pass, float32 [R]; None: they were known before


# Values of all response tokens of a step, float32 [R] on the CPU, by their names in LossInputs, which describes them.
StepTokens = dict[str, torch.Tensor | None]


def _finite(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.isfinite(v) for v in values]).all(0)


class Policy:
    """One rank's part of the policy. Raises ValueError if model folder and layout do not fit each other.

    `chunks`: the layers that this rank holds; with interleaved pipeline stages `parallel.vpp` chunks, which are not
    adjacent in the model. `ddp` wraps the chunks, in the same order. `build` makes them.
    """

    settings = "optimizer"  # the configuration's section of the optimizer, for messages

    def __init__(self, spec: ModelSpec, config: Config, layout: Layout, build: Build = build_chunks):
        self.spec, self.config, self.layout = spec, config, layout
        self._cost = SequenceCost.of_model(spec)
        self.chunks = build(spec, config, layout)
        self._frozen = FrozenModels(self.chunks, spec, config, layout)
        self.base_digest: str | None = None  # of the weights that adapters are beside
        if config.model.lora is not None:
            self.base_digest = model_digest(config.model.path, spec, layout)
            add_adapters(self.chunks, config.model.lora, config.seed)
        self._prepare_head()
        self.ddp = wrap(self.chunks, layout)
        self.optimizer = build_optimizer(config.optimizer, self.ddp)
        self.spikes = Spikes(config.optimizer.spike) if config.optimizer.spike is not None else None
        self.loss_config = config.policy_loss()
        self.loss_function = load_loss(function) if (function := config.algorithm.loss.function) else None
        if layout.device.type == "cuda":
            check_layers(layout.device, self.chunks[0].config.params_dtype)
        if layout.is_last_stage:
            self._check_head()

    def _prepare_head(self) -> None:
        """Once the weights are loaded, before the chunks are wrapped: a critic has another head."""

    def _check_head(self) -> None:
        config, head = self.config, {name: self._head[name] for name in ("backend", "temperature", "tp_group")}
        check_backend(
            self._head_weight,
            self.loss_config,
            gradient="recompute" if self.loss_function is not None else config.kernels.gradient,
            kl_cov=config.algorithm.loss.kl_cov is not None,
            response_ratio=config.algorithm.loss.ratio != "token",
            **head,
        )

    @property
    def _head_weight(self) -> torch.Tensor:
        """[padded vocab / tp, h], on the last stage."""
        return self.chunks[-1].head_weight

    @property
    def _head(self) -> dict:
        """The arguments of all head functions besides the data."""
        return {
            "temperature": self.config.rollout.temperature,
            "vocab_size": self.spec.vocab_size,
            "tp_group": self.layout.tp if self.layout.tp.size() > 1 else None,
            "backend": self.config.kernels.backend,
            "chunk_tokens": self.config.kernels.chunk_tokens,
        }

    def pack(self, source: Sequences, mini_batches: Sequence[np.ndarray]) -> list[MiniBatch]:
        """Packs this rank's part of each of `mini_batches` (indices of sequences, ascending) into micro-batches."""
        parallel, budget = self.config.parallel, self.config.trainer.micro_batch_tokens
        dp, cp = self.layout.dp, self.layout.cp
        lengths, packed = np.diff(source.offsets) - 1, []
        for members in mini_batches:
            assigned = assign_micro_batches(
                lengths[members].tolist(),
                dp.size(),
                budget,
                cost=self._cost,
                multiple=parallel.pp if parallel.vpp > 1 else 1,
            )
            micro_batches = [
                MicroBatch.pack(
                    source,
                    members[sequences].tolist(),
                    multiple=parallel.tp if parallel.sequence_parallel else 1,
                    device=self.layout.device,
                    cp_rank=cp.rank(),
                    cp_size=cp.size(),
                )
                for sequences in assigned[dp.rank()]
            ]
            packed.append(MiniBatch(members, micro_batches))
        return packed

    def _run(self, micro_batches: list[MicroBatch], on_hidden, *, forward_only: bool) -> None:
        """Sends micro-batches through the pipeline; `on_hidden(micro_batch, hidden rows) -> loss` on the last stage."""
        if not micro_batches:
            return

        def forward_step(iterator, chunk):
            micro_batch = next(iterator)
            output = chunk.module.forward_packed(micro_batch)

            def loss_function(hidden):
                loss = on_hidden(micro_batch, hidden.index_select(0, micro_batch.rows))
                return loss, torch.zeros((), dtype=torch.int, device=hidden.device), {}

            return output, loss_function

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=1,  # not used: with variable_seq_lengths the stages exchange shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    @torch.no_grad()
    def token_stats(
        self,
        source: Sequences,
        mini_batches: Sequence[MiniBatch],
        model: str = "policy",
        temperature: float | None = None,
        method: str = "token_stats",
    ) -> TokenStats:
        """Statistics of all response tokens of `source`, from which `mini_batches` are packed.

        `model`: whose weights are in place, for messages. `temperature` None: the rollouts' temperature. `method`: of
        Policy, which calls this, for `replay --step`. Raises, on every rank, NonFiniteError, and ValueError for a token
        outside the vocabulary, whose embedding would be zeros or a row of padding."""
        source.check_tokens(self.spec.vocab_size)
        found: list[Measured] = []
        head = self._head if temperature is None else {**self._head, "temperature": temperature}

        def collect(micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            stats = kernels.token_stats(hidden, self._head_weight, micro_batch.labels, **head)
            found.append((micro_batch.slots, torch.stack(stats)))
            return hidden.new_zeros(())

        self._run([m for mini in mini_batches for m in mini.micro_batches], collect, forward_only=True)
        given = {} if temperature is None or method != "token_stats" else {"temperature": temperature}
        return self._gathered(found, PassInputs(method, source, [m.members for m in mini_batches], given), model)

    def _gathered(self, found: list[Measured], inputs: PassInputs, model: str = "policy") -> TokenStats:
        """The statistics that all ranks have found. Raises NonFiniteError."""
        gathered = torch.zeros(4, int(inputs.sequences.response_offsets[-1]))
        if found:  # in one transfer, not one per micro-batch
            slots, rows = zip(*found, strict=True)
            gathered[:, torch.cat(slots)] = torch.cat(rows, 1).cpu()
        gathered = self.layout.world_sum(gathered)
        if not is_finite(gathered):
            raise self._non_finite(inputs.bad_statistics(gathered, model), inputs)
        return TokenStats(*gathered)

    def _non_finite(self, message: str, inputs: PassInputs) -> NonFiniteError:
        broken = broken_weights(self.chunks, self.spec, self.layout)
        return NonFiniteError(message if broken is None else f"{message}; {broken}", inputs)

    def reference_logprobs(self, source: Sequences, mini_batches: Sequence[MiniBatch]) -> torch.Tensor | None:
        """float32 [R] logprobs under the reference policy, for DPO at temperature 1; None without KL term and DPO.
        Raises as `token_stats`."""
        keys = {"algorithm.kl.reference": None, "dpo.reference": 1.0}
        for key in keys.keys() & self.config.frozen_models.keys():
            options = {"temperature": keys[key], "method": "reference_logprobs"}
            return self._frozen_logprobs(key, source, mini_batches, **options)
        return None

    def teacher_logprobs(self, source: Sequences, mini_batches: Sequence[MiniBatch]) -> torch.Tensor:
        """float32 [R] logprobs under the teacher, a model of the policy's shape. Raises as `token_stats`."""
        return self._frozen_logprobs("algorithm.teacher.path", source, mini_batches, method="teacher_logprobs")

    def implicit_rewards(self, source: Sequences, mini_batches: Sequence[MiniBatch]) -> np.ndarray | None:
        """float64 [R] beta (log p - log p_reference) of the reward `prime`, at temperature 1, as its models were
        trained; None without this reward. Raises as `token_stats`."""
        if not self.config.reward.implicit:
            return None
        options = {"temperature": 1.0, "method": "implicit_rewards"}
        trained, reference = (
            self._frozen_logprobs(key, source, mini_batches, **options).double().numpy()
            for key in ("reward.prime.model", "reward.prime.reference")
        )
        return self.config.reward.prime.beta * (trained - reference)

    def _frozen_logprobs(
        self, key: str, source: Sequences, mini_batches: Sequence[MiniBatch], **options
    ) -> torch.Tensor:
        """Logprobs of the model that `key` of the configuration names, in place of the policy's."""
        folder = self.config.frozen_models[key]
        with self._frozen.in_place(folder):
            return self.token_stats(source, mini_batches, f"{key} {folder}", **options).logprobs

    def update(self, *args, **given) -> dict[str, float]:
        """One optimizer step on the rollouts of a mini-batch: `gradient`, whose arguments it takes, and `step`."""
        return self.step(self.gradient(*args, **given))

    def gradient(
        self,
        batch: TrainBatch,
        mini_batch: MiniBatch,
        stats: TokenStats | None,
        reference_logprobs: torch.Tensor | None,
        learning_rate: float,
    ) -> Gradient:
        """The gradient of the loss of `mini_batch`'s rollouts, for `step`; `found` has this update's sums and gradient
        norm, and `selected`, the number of tokens that entropy_top_ratio, clip_cov or kl_cov selected.

        `stats`: of the policy that the step began with; None (Config.old_logprobs): this is that policy, every ratio to
        it is 1, and `Gradient.stats` has them.
        There is no gradient (`skipped` 1) if no token can give one (all weights are 0, or all advantages are 0 and
        there are neither KL nor entropy terms), and with a user's function if it is 0. Raises, on every rank,
        NonFiniteError, UserCodeError, and ValueError for a token outside the vocabulary.
        """
        measures, engine = stats is None, torch.from_numpy(batch.rollouts.engine_logprobs)
        if measures:
            batch.rollouts.check_tokens(self.spec.vocab_size)
        known, algorithm = stats, self.config.algorithm
        if known is None:  # a method that used them would get NaN; the head's loss makes the correction
            known = TokenStats(*torch.full((4, len(engine)), math.nan))
            algorithm = algorithm.model_copy(update={"rollout_correction": None})
        shaped = shape_tokens(
            batch.rollouts,
            mini_batch.members,
            batch.advantages,
            batch.weights,
            known,
            algorithm,
            seed=self.config.seed,
            process=batch.process,
        )
        tokens = {
            "old_logprobs": engine if self.config.algorithm.loss.old == "engine" else stats and stats.logprobs,
            "engine_logprobs": engine,
            "reference_logprobs": reference_logprobs,
            "advantages": shaped.advantages,
            "weights": shaped.weights,
        }
        given = {"batch": batch, "stats": stats, "reference_logprobs": reference_logprobs}
        given["learning_rate"] = learning_rate
        inputs = PassInputs("update", batch.rollouts, [mini_batch.members], given)
        if self.loss_function is not None:
            head_loss = functools.partial(self._custom_loss, tokens)
        elif (head_loss := self._fused_loss(tokens, shaped, measures)) is None:
            measured = self.token_stats(batch.rollouts, [mini_batch]) if measures else None
            return Gradient(inputs, {"skipped": 1.0}, measured)
        gradient = self._gradient(inputs, mini_batch, head_loss, measures)
        return gradient._replace(found={**gradient.found, "selected": float(shaped.selected.sum())})

    def _fused_loss(self, tokens: StepTokens, shaped: Shaped, measures: bool) -> LossOfHidden | None:
        """The built-in loss of a micro-batch, with the statistics of all rows if it `measures`; None if no token can
        give a gradient."""
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
                measured = kernels.token_stats(every, self._head_weight, labels, **self._head)
                engine = to_device(tokens["engine_logprobs"][slots], device)
                gap, of_rows = measured.logprobs.double() - engine, self._responses(micro_batch)
                ratios = importance_ratios(gap, level=correction.level, **of_rows)
                constants[2] = constants[2] * correction_weights(ratios, correction)[rows].to(constants[2].dtype)
            output = kernels.policy_loss(
                hidden,
                self._head_weight,
                labels[taken],
                *constants,
                loss,
                ref_logprobs=reference,
                old_kl_coef=old_kl_coef,
                log_ratios=None if log_ratios is None else log_ratios[rows],
                ranges=ranges,
                cu_seqlens=micro_batch.response_bounds if whole_sequences else None,
                gradient=self.config.kernels.gradient,
                **self._head,
            )
            if not measures:
                return HeadLoss(output.loss, output.metrics)
            stats = torch.stack(output.stats if measured is None else measured)
            if stats.shape[1] < len(slots):
                left = (~trained[slots]).nonzero()[:, 0]
                others = to_device(left, device)
                rest = kernels.token_stats(every[others], self._head_weight, labels[left], **self._head)
                found = stats.new_empty(len(stats), len(slots))
                found[:, rows], found[:, others] = stats, torch.stack(rest)
                stats = found
            return HeadLoss(output.loss, output.metrics, stats)

        return policy_loss

    def _custom_loss(self, tokens: StepTokens, micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
        """The user's function's loss of all response tokens; it need not be 0 for tokens whose advantage is 0. Adds the
        KL term unless kl.where is `function`. Raises UserCodeError."""
        kl, slots = self.config.algorithm.kl, micro_batch.slots
        head = kernels.token_logprobs(hidden, self._head_weight, micro_batch.labels, **self._head)
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
        logprobs = kernels.token_stats(hidden, self._head_weight, micro_batch.labels, **self._head).logprobs
        difference = logprobs - to_device(old_logprobs, logprobs.device)
        return response_log_ratios(difference, ratio=ratio, **self._responses(micro_batch))

    def _responses(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """The rows of each of the micro-batch's responses here, and what adds up over context-parallel ranks."""
        add_up = functools.partial(dist.all_reduce, group=self.layout.cp) if self.layout.cp.size() > 1 else None
        return {"lengths": micro_batch.response_bounds.diff().long(), "add_up": add_up}

    def fit(self, sequences: Sequences, weights: np.ndarray, learning_rate: float) -> dict[str, float]:
        """One optimizer step on the cross-entropy of the responses. `weights`: float [S], of each token of a response.

        Returns `loss` (nats, the weighted sum) and `grad_norm`. Raises NonFiniteError as `update`, ValueError as
        `token_stats`.
        """
        sequences.check_tokens(self.spec.vocab_size)
        rows = [np.arange(len(weights))]
        (mini_batch,) = self.pack(sequences, rows)
        inputs = PassInputs("fit", sequences, rows, {"weights": weights, "learning_rate": learning_rate})
        per_token = torch.from_numpy(sequences.per_token(weights)).float()
        head = {**self._head, "temperature": 1.0}

        def cross_entropy(micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
            weight = to_device(per_token[micro_batch.slots], self.layout.device)
            # On-policy with an advantage of 1, the policy gradient is the cross-entropy's.
            output = kernels.policy_loss(
                hidden,
                self._head_weight,
                micro_batch.labels,
                torch.ones_like(weight),
                None,
                weight,
                PolicyLossConfig(),
                gradient=self.config.kernels.gradient,
                **head,
            )
            return HeadLoss(output.loss, {"loss": -(weight * output.stats.logprobs).sum()})

        return self.step(self._gradient(inputs, mini_batch, cross_entropy))

    def _gradient(
        self, inputs: PassInputs, mini_batch: MiniBatch, head_loss: LossOfHidden, measures: bool = False
    ) -> Gradient:
        """Sums and flags stay on the device until the last micro-batch: the host waits for none."""
        names = ("loss", "kl", "clipped", "clipped_dual", "damped", "boosted", "broken")
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.layout.device)
        measured: list[Measured] = []

        def on_hidden(micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            output = head_loss(micro_batch, hidden)
            for i, name in enumerate(names):
                if name in output.metrics:
                    sums[i] += output.metrics[name].detach().double()
            if output.stats is not None:
                measured.append((micro_batch.slots, output.stats))
            return output.loss

        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(mini_batch.micro_batches, on_hidden, forward_only=False)
        finalize_model_grads(self.ddp)
        self.optimizer.prepare_grads()
        on_host = sums.to("cpu", non_blocking=True)  # complete once Megatron has waited for the norm
        grad_norm = float(self.optimizer.get_grad_norm())
        stats = self._gathered(measured, inputs) if measures else None
        totals = self.layout.world_sum(on_host)
        result = {**dict(zip(names, totals.tolist(), strict=True)), "grad_norm": grad_norm, "skipped": 0.0}
        if not (math.isfinite(grad_norm) and math.isfinite(result["loss"])):
            if inputs.method == "update":  # the statistics are finite, so an earlier update of the step did this
                self.check_weights(inputs.given["learning_rate"])
            what = f"loss {result['loss']:g}, gradient norm {grad_norm:g} before the optimizer step"
            if result["broken"]:
                tokens = f"{result['broken']:g} tokens a loss or derivative that is NaN or infinite"
                what = f"{self.loss_function.name} gave {tokens}: {what}"
            raise self._non_finite("; ".join([what, *inputs.faults()]), inputs)
        corrected = measures and self.config.algorithm.rollout_correction is not None  # all weights may be 0
        if grad_norm == 0 and (corrected or self.loss_function is not None):
            result["skipped"] = 1.0
        return Gradient(inputs, result, stats)

    def step(self, gradient: Gradient) -> dict[str, float]:
        """One optimizer step along the gradient that was computed last. Returns `found`. The step is skipped (`skipped`
        1) without a gradient, and with `optimizer.spike` if the gradient is a spike (`spike` 1). Raises GradientSpike
        on every rank."""
        found = gradient.found
        if found["skipped"]:
            return found
        if self.spikes is not None and self.spikes.on_all_ranks(found["grad_norm"], self.layout):
            return {**found, "skipped": 1.0, "spike": 1.0}
        optimizer_step(self.optimizer, self.config.optimizer, gradient.inputs.given["learning_rate"])
        return found

    def check_weights(self, learning_rate: float) -> None:
        """To be called after the updates of a step, at this learning rate, before the weights are sent or saved. Raises
        NonFiniteError on every rank if they are NaN, infinite or too large to compute with."""
        if broken := broken_weights(self.chunks, self.spec, self.layout):
            raise NonFiniteError(
                f"the update at learning rate {learning_rate:g} ruined the weights, and they are not saved: "
                f"{broken}; lower {self.settings}.lr or {self.settings}.weight_decay",
                None,
            )
