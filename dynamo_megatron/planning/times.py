"""Seconds of a step at the hardware's stated rates, which are floors: FLOPs, and bytes that ranks exchange. Sources and
names as in formulas.py; [K], [N], [Z], [M] are its."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_megatron.config import Config
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.formulas import GRADIENT, WIDTH, StageState
from dynamo_megatron.planning.hardware import GPU, Cluster
from dynamo_megatron.policy.micro_batches import SequenceCost

FP8_RATE = 2  # times a GPU's bfloat16 rate, by the makers' tables


@dataclass(frozen=True)
class Times:
    """Seconds of a step, each at the hardware's stated rates: nothing is faster."""

    generate: float
    logprobs: float
    update: float
    weight_sync: float
    overlap: bool  # servers generate while the ranks train: `rollout.max_staleness`

    @property
    def training(self) -> float:
        return self.logprobs + self.update + self.weight_sync

    @property
    def step(self) -> float:
        if self.overlap:
            return max(self.generate, self.logprobs + self.update) + self.weight_sync
        return self.generate + self.training


def forward_flops(spec: ModelSpec, lengths: Sequence[tuple[float, float]]) -> float:
    """FLOPs of one forward pass over (how many, length) sequences: 2 a parameter and token in matrix products, and
    causal attention's two products over half the square. [N] appendix, [K] section 2.1; `SequenceCost` of
    policy/micro_batches.py.
    """
    cost = SequenceCost.of_model(spec)
    return 2 * sum(count * cost(length) for count, length in lengths)


def training_seconds(
    config: Config, spec: ModelSpec, cluster: Cluster, length: float, stages: Sequence[StageState], micro_batches: int
) -> tuple[float, float]:
    """(log-probs, update). `length`: tokens of the mean sequence; `micro_batches`: of an update, on each rank.

    A rank sends, of its `own` tokens in a forward pass: two all-reduces a layer (or a reduce-scatter and an all-gather
    each), 2 (tp - 1) / tp of the hidden states apiece, [K] section 4.2.1, of a mixture of experts one; its keys and
    values to the other context-parallel ranks; each token to its experts and back. The gradients come back the same
    way, and sequence parallelism's backward gathers each column-parallel layer's input besides: three halves of the
    forward's ([M] tensor_parallel/layers.py). Full recomputation repeats the forward.
    """
    p, w, layers = config.parallel, WIDTH[config.model.dtype], spec.num_layers / config.parallel.pp
    own = config.rollout_budget * length * p.model_ranks / cluster.gpus / p.cp
    reduces = 1 if spec.num_experts else 2
    hidden = layers * reduces * 2 * (p.tp - 1) / p.tp * w * spec.hidden_size * own / cluster.link(p.tp)
    keys_and_values = 2 * spec.num_query_groups * spec.kv_channels / p.tp * w * own
    others = layers * (p.cp - 1) * keys_and_values / cluster.link(p.cp, p.tp)
    if spec.num_experts:
        copies = spec.router_topk * own / p.tp
        others += layers * 2 * (p.ep - 1) / p.ep * copies * spec.hidden_size * w / cluster.link(p.ep)
    again = 1 if config.trainer.recompute == "full" else 0
    # One forward pass of log-probs (2N), three of an update (6N), four with full recomputation (8N); [N].
    forward = forward_flops(spec, [(config.rollout_budget, length)]) / (cluster.gpus * cluster.gpu.flops)
    once = forward + hidden + others
    often = (3 + again) * forward + ((2.5 if p.sequence_parallel else 2) + again) * hidden + (2 + again) * others
    # Reduce-scatter of the float32 gradients and all-gather of the parameters among the ranks that share them; [Z].
    dp_cp, expert_dp = cluster.gpus // (p.tp * p.pp), cluster.gpus // (p.pp * p.ep)
    reduce = max(
        (dp_cp - 1) / dp_cp * stage.dense * (GRADIENT + w) / cluster.link(dp_cp, p.tp)
        + (expert_dp - 1) / expert_dp * stage.experts * (GRADIENT + w) / cluster.link(expert_dp, p.ep)
        for stage in stages
    )
    idle = (p.pp - 1) / (micro_batches * p.vpp)  # the pipeline's bubble over its working time; [N] section 2.2
    updates = updates_of(config)  # the passes of log-probs run through all of them without a stop
    return once * (1 + idle / updates), often * (1 + idle) + updates * reduce


def updates_of(config: Config) -> int:
    """Of a step."""
    return min(config.algorithm.loss.mini_batches, config.batch_prompts)


def decode_seconds(config: Config, spec: ModelSpec, gpu: GPU, sequences: float, context: float) -> float:
    """Of one token of each of `sequences` sequences on one server, at least: its weights (of a mixture of experts those
    that some sequence chose) and their keys and values are read once, or their products computed."""
    dtype, tp, quantization = config.model.dtype, config.rollout.tp, config.rollout.quantization
    read = formulas.server_bytes(spec, tp, dtype, quantization)
    read += sequences * context * formulas.kv_bytes_a_token(spec, tp, dtype)
    if spec.num_experts:
        unread = (1 - spec.router_topk / spec.num_experts) ** sequences
        read -= formulas.expert_elements(spec) / tp * unread * formulas.linear_width(dtype, quantization)
    products = 2 * sequences * SequenceCost.of_model(spec).linear
    return max(read / gpu.memory_bandwidth, products / (tp * server_flops(config, gpu)))


def server_flops(config: Config, gpu: GPU) -> float:
    """A second of a GPU of a server, at most."""
    return gpu.flops * (1 if config.rollout.quantization is None else FP8_RATE)
