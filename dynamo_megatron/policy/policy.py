"""The policy on every rank: token statistics and updates through Megatron's pipeline schedules.

Gradient scaling: the loss of a micro-batch is `sum_t w_t loss_t` with weights normalised over the whole mini-batch, so
the gradients of micro-batches and data-parallel ranks are only added. With `calculate_per_token_loss` and a token count
of 0 Megatron does not scale them: the upstream gradient of every micro-batch is exactly 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.checkpoint.weights import model_digest
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.kernels.self_check import check_layers
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import is_finite
from dynamo_megatron.policy.batch import (
    MicroBatch,
    MiniBatch,
    SequenceCost,
    TrainBatch,
    assign_micro_batches,
    silent_rollouts,
)
from dynamo_megatron.policy.frozen_models import FrozenModels
from dynamo_megatron.policy.head import LossOfHidden, PolicyHead
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.lora import add_adapters
from dynamo_megatron.policy.model import PolicyModel, build_chunks
from dynamo_megatron.policy.non_finite import NonFiniteError, PassInputs
from dynamo_megatron.policy.optimizer import build_optimizer, optimizer_step, wrap
from dynamo_megatron.policy.routing import ExpertRouting
from dynamo_megatron.types import Sequences, TokenStats

Measured = tuple[torch.Tensor, torch.Tensor]  # slots of tokens, on the CPU, and their values, [count, r] on the device
Build = Callable[[ModelSpec, Config, Layout], list[PolicyModel]]


class Gradient(NamedTuple):
    """The gradient of a mini-batch, in the policy's gradient buffers, before the optimizer's step."""

    inputs: PassInputs
    found: dict[str, float]  # what `Policy.update` returns; `skipped` 1: there is no gradient
    stats: TokenStats | None = None  # of the policy that it is of, float32 [R]; None: they were known before


class Policy:
    """One rank's part of the policy. Raises ValueError if model folder and layout do not fit each other.

    `chunks`: the layers that this rank holds; with interleaved pipeline stages `parallel.vpp` chunks, which are not
    adjacent in the model. `ddp` wraps the chunks, in the same order. `build` makes them.
    """

    def __init__(self, spec: ModelSpec, config: Config, layout: Layout, build: Build = build_chunks):
        self.spec, self.config, self.layout = spec, config, layout
        self._cost = SequenceCost.of_model(spec)
        self.chunks = build(spec, config, layout)
        self.frozen = FrozenModels(self.chunks, spec, config, layout)
        self.base_digest: str | None = None  # of the weights that adapters are beside
        if config.model.lora is not None:
            self.base_digest = model_digest(config.model.path, spec, layout)
            add_adapters(self.chunks, config.model.lora, config.seed)
        self.routing = ExpertRouting(self.chunks, spec, layout) if spec.num_experts else None
        self._prepare_head()
        self.ddp = wrap(self.chunks, layout)
        self.optimizer = build_optimizer(config.optimizer, self.ddp)
        self.head = PolicyHead(self.chunks[-1], spec, config, layout)
        if layout.device.type == "cuda":
            check_layers(layout.device, self.chunks[0].config.params_dtype)
        if layout.is_last_stage:
            self._check_head()

    def _prepare_head(self) -> None:
        """Once the weights are loaded, before the chunks are wrapped: a critic has another head."""

    def _check_head(self) -> None:
        self.head.check()

    def pack(self, source: Sequences, mini_batches: Sequence[np.ndarray]) -> list[MiniBatch]:
        """Packs this rank's part of each of `mini_batches` (indices of sequences, ascending) into micro-batches.

        Silent rollouts have micro-batches of their own, which need no backward pass, where that saves time."""
        parallel, dp, cp = self.config.parallel, self.layout.dp, self.layout.cp
        if source.routes is not None:
            source = self._replayed(source)
        lengths, silent, packed = np.diff(source.offsets) - 1, silent_rollouts(source, self.config), []
        place = {"device": self.layout.device, "cp_rank": cp.rank(), "cp_size": cp.size()}
        place["multiple"] = parallel.tp if parallel.sequence_parallel else 1

        def assign(members: np.ndarray) -> list[np.ndarray]:  # the sequences of each of this rank's micro-batches
            budget, multiple = self.config.trainer.micro_batch_tokens, parallel.pp if parallel.vpp > 1 else 1
            of_ranks = assign_micro_batches(
                lengths[members].tolist(), dp.size(), budget, cost=self._cost, multiple=multiple
            )
            return [members[sequences] for sequences in of_ranks[dp.rank()]]

        for members in mini_batches:
            assigned, count = assign(members), 0
            if (here := silent[members]).any():
                others, alone = assign(members[~here]), assign(members[here])
                # In forward passes, of which a backward pass takes two. Without a pass before the update one more
                # pipeline has to fill.
                passes, fill = (4, 0) if self.config.algorithm.measures_first else (3, parallel.pp - 1)
                if passes * (len(assigned) - len(others)) > len(alone) + fill:
                    assigned, count = others + alone, len(alone)
            micro_batches = [MicroBatch.pack(source, sequences.tolist(), **place) for sequences in assigned]
            packed.append(MiniBatch(members, micro_batches, count))
        return packed

    def _replayed(self, source: Sequences) -> Sequences:
        """`source` without its routes where the run replays none. Raises ValueError for those of another model."""
        assert source.routes is not None
        if (routes := self.spec.replayed(self.config.rollout)) is None:
            return dataclasses.replace(source, routes=None)
        if source.routes.shape[1:] != (routes.layers, routes.topk) or source.routes.dtype != routes.dtype:
            _, layers, topk = source.routes.shape
            raise InputError(
                f"the rollouts have routes to {topk} experts in {layers} layers ({source.routes.dtype}), and the model "
                f"has {routes.topk} of {routes.experts} in {routes.layers}; use rollouts of this model, or set "
                "rollout.router_replay to false"
            )
        return source

    def _run(self, micro_batches: Sequence[MicroBatch], on_hidden, *, forward_only: bool, routed: bool = True) -> None:
        """Sends micro-batches through the pipeline; `on_hidden(micro_batch, hidden rows) -> loss` on the last stage.
        `routed`: routes are counted and replayed."""
        if not micro_batches:
            return
        routing = self.routing if routed else None

        def forward_step(iterator, chunk):
            micro_batch = next(iterator)
            given = routing and routing.of(micro_batch, self.config.parallel.sequence_parallel)
            output = chunk.module.forward_packed(micro_batch, given)

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

    def token_stats(
        self,
        source: Sequences,
        mini_batches: Sequence[MiniBatch],
        model: str | None = None,
        temperature: float | None = None,
    ) -> TokenStats:
        """Statistics of all response tokens of `source`, from which `mini_batches` are packed.

        `model`: the configuration's key of a model beside the policy, which takes its place; it routes by itself. None:
        the policy. `temperature` None: the rollouts' temperature. Raises, on every rank, NonFiniteError, and ValueError
        for a token outside the vocabulary, whose embedding would be zeros or a row of padding."""
        source.check_tokens(self.spec.vocab_size)
        found: list[Measured] = []
        inputs = PassInputs(source, [m.members for m in mini_batches], {"model": model, "temperature": temperature})
        micro_batches = [m for mini in mini_batches for m in mini.micro_batches]
        if model is None:
            self._measure(micro_batches, found, temperature)
            return self._gathered(found, inputs, "policy")
        folder = self.config.frozen_models[model]
        with self.frozen.in_place(folder):
            self._measure(micro_batches, found, temperature, routed=False)
        return self._gathered(found, inputs, f"{model} {folder}")

    @torch.no_grad()
    def _measure(
        self,
        micro_batches: Sequence[MicroBatch],
        found: list[Measured],
        temperature: float | None = None,
        routed: bool = True,
    ) -> None:
        """Appends the statistics of `micro_batches` to `found`, on the last stage."""

        def collect(micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            stats = self.head.token_stats(hidden, micro_batch.labels, temperature)
            found.append((micro_batch.slots, torch.stack(stats)))
            return hidden.new_zeros(())

        self._run(micro_batches, collect, forward_only=True, routed=routed)

    def _gathered(self, found: list[Measured], inputs: PassInputs, model: str) -> TokenStats:
        """The statistics that all ranks have found of `model`. Raises NonFiniteError."""
        gathered = self._of_all_ranks(found, 4, inputs.sequences)
        if not is_finite(gathered):
            raise self._non_finite(inputs.bad_statistics(gathered, model), inputs)
        return TokenStats(*gathered)

    def _of_all_ranks(self, found: list[Measured], count: int, source: Sequences) -> torch.Tensor:
        """float32 [count, R]: the values that all ranks have found of each response token of `source`."""
        gathered = torch.zeros(count, int(source.response_offsets[-1]))
        if found:  # in one transfer, not one per micro-batch
            slots, rows = zip(*found, strict=True)
            gathered[:, torch.cat(slots)] = torch.cat(rows, 1).cpu()
        return self.layout.world_sum(gathered)

    def _non_finite(self, message: str, inputs: PassInputs) -> NonFiniteError:
        return NonFiniteError(message, inputs)

    def reference_logprobs(self, source: Sequences, mini_batches: Sequence[MiniBatch]) -> torch.Tensor | None:
        """float32 [R] logprobs under the reference policy, for DPO at temperature 1; None without KL term and DPO.
        Raises as `token_stats`."""
        for key, temperature in (("algorithm.kl.reference", None), ("dpo.reference", 1.0)):
            if key in self.config.frozen_models:
                return self.token_stats(source, mini_batches, key, temperature).logprobs
        return None

    def implicit_rewards(self, source: Sequences, mini_batches: Sequence[MiniBatch]) -> np.ndarray | None:
        """float64 [R] beta (log p - log p_reference) of the reward `prime`, at temperature 1, as its models were
        trained; None without this reward. Raises as `token_stats`."""
        if not self.config.reward.implicit:
            return None
        trained, reference = (
            self.token_stats(source, mini_batches, key, 1.0).logprobs.double().numpy()
            for key in ("reward.prime.model", "reward.prime.reference")
        )
        return self.config.reward.prime.beta * (trained - reference)

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
        given = (batch.advantages, batch.weights, known, algorithm)
        shaped = shape_tokens(batch.rollouts, mini_batch.members, *given, seed=self.config.seed, process=batch.process)
        tokens = {
            "old_logprobs": engine if self.config.algorithm.loss.old == "engine" else stats and stats.logprobs,
            "engine_logprobs": engine,
            "reference_logprobs": reference_logprobs,
            "advantages": shaped.advantages,
            "weights": shaped.weights,
        }
        given = {"batch": batch, "stats": stats, "reference_logprobs": reference_logprobs}
        given["learning_rate"] = learning_rate
        inputs = PassInputs(batch.rollouts, [mini_batch.members], given, "update")
        if (head_loss := self.head.loss_of(tokens, shaped, measures)) is None:
            measured = self.token_stats(batch.rollouts, [mini_batch]) if measures else None
            return Gradient(inputs, {"skipped": 1.0}, measured)
        count = len(mini_batch.micro_batches) - mini_batch.silent_count
        others, silent = mini_batch.micro_batches[:count], mini_batch.micro_batches[count:]
        assert not any(shaped.trained[m.slots].any() for m in silent), "silent rollouts have a gradient"
        gradient = self._gradient(inputs, others, head_loss, measures, silent)
        return gradient._replace(found={**gradient.found, "selected": float(shaped.selected.sum())})

    def fit(self, sequences: Sequences, weights: np.ndarray, learning_rate: float) -> dict[str, float]:
        """One optimizer step on the cross-entropy of the responses. `weights`: float [S], of each token of a response.

        Returns `loss` (nats, the weighted sum) and `grad_norm`. Raises NonFiniteError as `update`, ValueError as
        `token_stats`.
        """
        sequences.check_tokens(self.spec.vocab_size)
        rows = [np.arange(len(weights))]
        (mini_batch,) = self.pack(sequences, rows)
        inputs = PassInputs(sequences, rows, {"weights": weights, "learning_rate": learning_rate}, "fit")
        cross_entropy = self.head.cross_entropy(torch.from_numpy(sequences.per_token(weights)).float())
        return self.step(self._gradient(inputs, mini_batch.micro_batches, cross_entropy))

    def _gradient(
        self,
        inputs: PassInputs,
        micro_batches: list[MicroBatch],
        head_loss: LossOfHidden,
        measures: bool = False,
        silent: Sequence[MicroBatch] = (),
    ) -> Gradient:
        """`silent` ones have no gradient: they are only measured. Sums and flags stay on the device until the last
        micro-batch: the host waits for none."""
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

        if measures:
            self._measure(silent, measured)
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.routing is not None:
            self.routing.begin_gradient()
        self._run(micro_batches, on_hidden, forward_only=False)
        finalize_model_grads(self.ddp)
        self.optimizer.prepare_grads()
        on_host = sums.to("cpu", non_blocking=True)  # complete once Megatron has waited for the norm
        grad_norm = float(self.optimizer.get_grad_norm())
        stats = self._gathered(measured, inputs, "policy") if measures else None
        totals = self.layout.world_sum(on_host)
        result = {**dict(zip(names, totals.tolist(), strict=True)), "grad_norm": grad_norm, "skipped": 0.0}
        if not (math.isfinite(grad_norm) and math.isfinite(result["loss"])):
            what = f"loss {result['loss']:g}, gradient norm {grad_norm:g} before the optimizer step"
            if result["broken"]:
                tokens = f"{result['broken']:g} tokens a loss or derivative that is NaN or infinite"
                what = f"{self.head.loss_function.name} gave {tokens}: {what}"
            raise self._non_finite(what, inputs)
        corrected = measures and self.config.algorithm.rollout_correction is not None  # all weights may be 0
        if grad_norm == 0 and (corrected or self.head.loss_function is not None):
            result["skipped"] = 1.0
        return Gradient(inputs, result, stats)

    def step(self, gradient: Gradient) -> dict[str, float]:
        """One optimizer step along the gradient that was computed last. Returns `found`. The step is skipped (`skipped`
        1) without a gradient."""
        found = gradient.found
        if found["skipped"]:
            return found
        optimizer_step(self.optimizer, self.config.optimizer, gradient.inputs.given["learning_rate"])
        if self.routing is not None and (rate := self.config.model.expert_bias_update_rate):
            self.routing.balance(rate)
        return found
