"""The critic of PPO on every rank: a model of the policy's shape and layout whose head predicts, before each response
token, the rewards to come. It reads the policy's micro-batches through the policy's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from dynamo_megatron.algorithm.gae import value_loss
from dynamo_megatron.models.mapping import is_finite
from dynamo_megatron.policy.batch import MicroBatch, MiniBatch, TrainBatch, to_device
from dynamo_megatron.policy.head import HeadLoss
from dynamo_megatron.policy.non_finite import NonFiniteError, PassInputs
from dynamo_megatron.policy.policy import Measured, Policy
from dynamo_megatron.types import Sequences

BeginPhase = Callable[[str], object]  # of the run: moves to the device what the phase needs (weight_sync/memory.py)


class ValueHead(torch.nn.Module):
    """Hidden states [n, h] -> values float32 [n]. Whole on every tensor-parallel rank, as its input and its gradient
    are. Begins with values of 0."""

    def __init__(self, like: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(like.new_zeros(1, like.shape[-1]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float())[:, 0]


class Critic(Policy):
    """One rank's part of the critic; `config` is `Config.of_critic`. Raises ValueError as Policy does."""

    def _prepare_head(self) -> None:
        self.routing = None  # the rollouts' routes are the policy's
        for chunk in self.chunks:
            chunk.share_embeddings_and_output_weights = False
            if chunk.post_process:
                chunk.output_layer = ValueHead(chunk.decoder.final_layernorm.weight.detach())

    def _check_head(self) -> None:
        """Nothing to check: there is no kernel in it."""

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.chunks[-1].output_layer(hidden)

    def _non_finite(self, message: str, inputs: PassInputs) -> NonFiniteError:
        """Without the inputs, which `replay --step` would give to the policy."""
        return NonFiniteError(f"critic: {message}", None)

    @torch.no_grad()
    def values(self, source: Sequences, mini_batches: Sequence[MiniBatch], begin: BeginPhase) -> np.ndarray:
        """float64 [R]: the value before each response token of `source`, from which `mini_batches` are packed. Begins
        the phase `values`, and `logprobs` again at its end. Raises as `token_stats`."""
        begin("values")
        source.check_tokens(self.spec.vocab_size)
        found: list[Measured] = []

        def collect(micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
            found.append((micro_batch.slots, self._values(hidden)[None]))
            return hidden.new_zeros(())

        self._run([m for mini in mini_batches for m in mini.micro_batches], collect, forward_only=True)
        (values,) = self._of_all_ranks(found, 1, source)
        if not is_finite(values):
            raise NonFiniteError("critic: NaN or infinite values", None)
        begin("logprobs")
        return values.double().numpy()

    def fit_values(
        self, step: int, batch: TrainBatch, mini_batches: Sequence[MiniBatch], begin: BeginPhase
    ) -> list[dict[str, float]]:
        """One optimizer step on each of `mini_batches`, towards `batch.returns`. Begins the phase `critic`. Returns of
        each `loss`, the mean over its tokens, `clipped` (a count) and `grad_norm`. Raises NonFiniteError."""
        begin("critic")
        rate = self.config.learning_rate(step)
        return [self._fit_values(batch, mini_batch, rate) for mini_batch in mini_batches]

    def _fit_values(self, batch: TrainBatch, mini_batch: MiniBatch, learning_rate: float) -> dict[str, float]:
        assert batch.values is not None and batch.returns is not None
        clip, device = self.config.critic.value_clip, self.layout.device
        old, returns = (torch.from_numpy(each).float() for each in (batch.values, batch.returns))
        tokens = max(1, int(batch.rollouts.response_lengths[mini_batch.members].sum()))

        def loss_of_values(micro_batch: MicroBatch, hidden: torch.Tensor) -> HeadLoss:
            slots = micro_batch.slots
            here = (to_device(each[slots], device) for each in (old, returns))
            loss, clipped = value_loss(self._values(hidden), *here, clip)
            total = loss.sum() / tokens
            return HeadLoss(total, {"loss": total, "clipped": clipped.sum()})

        inputs = PassInputs(batch.rollouts, [mini_batch.members], {"learning_rate": learning_rate}, "fit")
        return self.step(self._gradient(inputs, mini_batch.micro_batches, loss_of_values))
