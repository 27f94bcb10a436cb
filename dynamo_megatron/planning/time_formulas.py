"""The planner's formulas of time: FLOPs, bytes that ranks exchange, seconds at the hardware's stated rates (floors).
Pure functions of shapes and layout; sources and names as in formulas.py."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning.formulas import (
    GRADIENT,
    WIDTH,
    active_elements,
    kv_bytes_a_token,
    linear_width,
    model_elements,
    server_bytes,
)
from dynamo_megatron.policy.micro_batches import SequenceCost


def forward_flops(spec: ModelSpec, lengths: Sequence[tuple[float, float]]) -> float:
    """FLOPs of one forward pass over (how many, length) sequences: 2 a parameter and token in matrix products, and
    causal attention's two products over half the square. [N] appendix, [K] section 2.1; `SequenceCost` of
    policy/micro_batches.py.
    """
    cost = SequenceCost.of_model(spec)
    return 2 * sum(count * cost(length) for count, length in lengths)


def pass_factor(kind: str, recompute: str) -> float:
    """Forward passes' FLOPs that a pass takes: log-probs 1 (2N), update 3 (6N), with full recomputation 4 (8N); [N]."""
    return {"logprobs": 1.0, "update": 4.0 if recompute == "full" else 3.0}[kind]


def bubble(p: ParallelConfig, micro_batches: int) -> float:
    """Idle time over working time of a pipeline: (pp - 1) / (m vpp); [N] section 2.2."""
    return (p.pp - 1) / (micro_batches * p.vpp)


def context_parallel_bytes(spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: float) -> float:
    """Bytes that a rank sends for `tokens` tokens in a forward pass: its keys and values to the others, each layer."""
    keys_and_values = 2 * spec.num_query_groups * spec.kv_channels / p.tp * WIDTH[dtype] * tokens / p.cp
    return spec.num_layers / p.pp * (p.cp - 1) * keys_and_values


def tensor_parallel_bytes(spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: float) -> float:
    """Bytes that a rank sends for `tokens` tokens through its stage's layers in a forward pass: two all-reduces a layer
    (or a reduce-scatter and an all-gather each), 2 (tp - 1) / tp of the hidden states apiece; [K] section 4.2.1. Of a
    mixture of experts one, the other being the experts' exchange."""
    reduces = 1 if spec.num_experts else 2
    hidden = WIDTH[dtype] * spec.hidden_size * tokens / p.cp
    return spec.num_layers / p.pp * reduces * 2 * (p.tp - 1) / p.tp * hidden


def expert_parallel_bytes(spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: float) -> float:
    """Bytes that a rank sends for `tokens` tokens in a forward pass: each to its experts and back."""
    if not spec.num_experts:
        return 0.0
    copies = spec.router_topk * tokens / (p.cp * p.tp)
    return spec.num_layers / p.pp * 2 * (p.ep - 1) / p.ep * copies * spec.hidden_size * WIDTH[dtype]


def exchanges(kind: str, recompute: str, *, gathered_again: bool = False) -> float:
    """Times that a pass sends what its forward pass does. log-probs: once. update: the gradients come back the same
    way, and with full recomputation the forward's exchange is repeated. `gathered_again`: sequence parallelism's
    backward gathers, besides, each column-parallel layer's input for the weight's gradient: three halves of the
    forward's; [M] tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication."""
    if kind == "logprobs":
        return 1.0
    return (2.5 if gathered_again else 2.0) + (1.0 if recompute == "full" else 0.0)


def data_parallel_bytes(elements: int, dtype: str, ranks: int) -> float:
    """Bytes that a rank sends in one update of parameters that `ranks` share: reduce-scatter of the float32 gradients,
    all-gather of the parameters; [Z]."""
    return (ranks - 1) / ranks * elements * (GRADIENT + WIDTH[dtype])


def decode_seconds(
    spec: ModelSpec,
    dtype: str,
    tp: int,
    sequences: float,
    context: float,
    flops: float,
    bandwidth: float,
    quantization: str | None = None,
) -> float:
    """Of one token of each of `sequences` sequences on one server, at least: its weights (of a mixture of experts those
    that some sequence chose) and their keys and values are read once, or their products computed."""
    read = server_bytes(spec, tp, dtype, quantization) + sequences * context * kv_bytes_a_token(spec, tp, dtype)
    if spec.num_experts:
        idle = 1 - spec.router_topk / spec.num_experts
        routed = model_elements(spec) - active_elements(spec)
        routed = routed / idle  # all experts
        read -= routed / tp * idle**sequences * linear_width(dtype, quantization)
    head_products = model_elements(spec) if spec.tied else model_elements(spec) - spec.vocab_size * spec.hidden_size
    active = head_products - (model_elements(spec) - active_elements(spec))
    return max(read / bandwidth, 2 * active * sequences / (tp * flops))
