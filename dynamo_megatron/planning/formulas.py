"""The planner's formulas of parameters and memory, pure functions of shapes and layout; docs/plan.md explains them to
users. time_formulas.py has those of time.

Sources: [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), whose
bytes are adapted to SwiGLU, grouped queries, RMSNorm, no dropout and an attention that keeps no scores; [N] Narayanan
et al., Efficient Large-Scale Language Model Training (arXiv 2104.04473), pipeline schedules; [Z] Rajbhandari et al.,
ZeRO (arXiv 1910.02054), what Megatron's distributed optimizer shards; [M] megatron-core 0.16.1, the file named; and
this project's own files. A name ends in what it counts where that is not bytes: elements, seconds, FLOPs.

"Saved" are the tensors that autograd keeps from the forward for the backward pass; tests/planning/test_memory.py
counts them in the policy's own model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_megatron.config import ParallelConfig
from dynamo_megatron.kernels.chunked import chunk_size
from dynamo_megatron.models.fp8 import QUANTIZED_BYTES, is_quantized
from dynamo_megatron.models.mapping import huggingface_shapes, is_expert, is_sharded
from dynamo_megatron.models.spec import ModelSpec

WIDTH = {"bfloat16": 2, "float32": 4}  # bytes an element
GRADIENT = 4  # bytes: main_grad is float32 (grad_reduce_in_fp32)
PARAM_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements: [M] distributed/param_and_grad_buffer.py


@dataclass(frozen=True)
class Chunk:
    """The parameters of one chunk of a pipeline stage on one rank, in elements."""

    dense: tuple[int, ...]
    experts: tuple[int, ...] = ()
    shared_embedding: int = 0  # of the dense ones, a tied embedding that another stage has too


@functools.lru_cache(maxsize=512)
def _layer(spec: ModelSpec, tp: int, ep: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dense, experts): elements of each parameter of a layer on one rank."""
    shapes = huggingface_shapes(spec)
    dense, experts = [], []
    for name, parts in spec.layer_names.items():
        elements = sum(math.prod(shapes[f"model.layers.0.{part}"]) for part in parts)
        if is_expert(name):
            experts.append(elements)
        else:
            dense.append(elements // tp if is_sharded(f"decoder.layers.0.{name}") else elements)
    return tuple(dense), tuple(experts[: len(experts) // ep])  # experts are alike, and whole on their rank


def stage_parameters(spec: ModelSpec, p: ParallelConfig, stage: int) -> list[Chunk]:
    """Chunks of pipeline stage `stage` (from 0), on each of its ranks alike.

    tests/planning/test_parameters.py holds it to the model that Megatron builds, rank by rank.
    """
    vocabulary = spec.padded_vocab(p.tp) // p.tp * spec.hidden_size
    dense, experts = _layer(spec, p.tp, p.ep)
    layers = spec.num_layers // (p.pp * p.vpp)
    chunks = []
    for index in range(p.vpp):
        first, last = stage == 0 and index == 0, stage == p.pp - 1 and index == p.vpp - 1
        own = dense * layers
        if first:
            own = (vocabulary, *own)
        if last:
            own = (*own, spec.hidden_size)
        if last and not (spec.tied and first):  # a tied head on another stage is a copy of the embedding
            own = (*own, vocabulary)
        shared = vocabulary if spec.tied and first != last else 0
        chunks.append(Chunk(own, experts * layers, shared))
    return chunks


@functools.lru_cache(maxsize=512)
def model_elements(spec: ModelSpec) -> int:
    """Parameters of the whole model, as its Hugging Face folder holds them (a tied head once, no padding)."""
    return sum(math.prod(shape) for shape in huggingface_shapes(spec).values())


@functools.lru_cache(maxsize=512)
def active_elements(spec: ModelSpec) -> int:
    """Parameters that a token passes: of a mixture of experts the chosen ones alone."""
    _, experts = _layer(spec, 1, 1)
    idle = spec.num_experts - spec.router_topk
    return model_elements(spec) - (spec.num_layers * idle * (sum(experts) // spec.num_experts) if experts else 0)


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def buffer_elements(parameters: Sequence[int], shared_embedding: int, ranks: int) -> int:
    """Elements of a contiguous parameter (or gradient) buffer that `ranks` share: every parameter begins at a multiple
    of 64, a bucket ends at one of 128 and of the ranks, and a shared embedding has a bucket of its own. [M]
    distributed/param_and_grad_buffer.py"""
    multiple = math.lcm(ranks, BUCKET_ALIGNMENT)
    total = sum(_padded(n, PARAM_ALIGNMENT) for n in parameters)
    if not shared_embedding:
        return _padded(total, multiple)
    alone = _padded(shared_embedding, PARAM_ALIGNMENT)
    return _padded(alone, multiple) + _padded(total - alone, multiple)


@dataclass(frozen=True)
class Static:
    """What a rank holds all the time, bytes."""

    parameters: int
    gradients: int
    optimizer: int
    optimizer_elements: int  # of the parameters whose optimizer state this rank has

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def static_memory(chunks: Sequence[Chunk], dtype: str, dp_cp: int, expert_dp: int) -> Static:
    """Parameters in `dtype`, float32 gradients, and of the share of a rank the optimizer's state: two float32 moments
    and, for bfloat16, the float32 main parameters. dp x cp ranks share dense parameters, expert_dp ranks an expert.
    [Z]: 2 + 4 + 12 / ranks bytes a parameter; [M] optimizer/distrib_optimizer.py"""
    held = share = 0
    for chunk in chunks:
        for parameters, shared, ranks in (
            (chunk.dense, chunk.shared_embedding, dp_cp),
            (chunk.experts, 0, expert_dp),
        ):
            if parameters:
                elements = buffer_elements(parameters, shared, ranks)
                held += elements
                share += elements // ranks
    state = 12 if dtype == "bfloat16" else 8
    return Static(held * WIDTH[dtype], held * GRADIENT, share * state, share)


@dataclass(frozen=True)
class StageState:
    """Of each rank of a pipeline stage: its parameters, elements, and what it holds."""

    dense: int
    experts: int
    static: Static


def stage_state(spec: ModelSpec, p: ParallelConfig, dtype: str, ranks: int, stage: int) -> StageState:
    """Stage `stage` (from 0) of `ranks` in all."""
    chunks = stage_parameters(spec, p, stage)
    static = static_memory(chunks, dtype, max(1, ranks // (p.tp * p.pp)), max(1, ranks // (p.pp * p.ep)))
    return StageState(sum(sum(c.dense) for c in chunks), sum(sum(c.experts) for c in chunks), static)


def layer_activations(
    spec: ModelSpec, p: ParallelConfig, dtype: str, *, norm_copies: int = 1, fused_swiglu: bool = True
) -> float:
    """Saved bytes of one layer for each token that this context-parallel rank has, without recomputation.

    [K] counts 34 h + 5 a s (a heads, sequences of s tokens) of a GELU layer. Here it is, with w bytes an element, of
    Megatron's own modules as policy/model.py configures them (float32 RMSNorm, attention by torch):
    both norms' float32 input 2 (4 h) and output 2 (w h); q, k, v, their attention's output twice (w each); SwiGLU's
    input, fc1's output 2 f, and its result f, in w each; RoPE's cosines and sines.
    `norm_copies`: float32 tensors that a norm saves, 1 where torch's is fused (CUDA, by torch's source), 2 on a CPU.
    `fused_swiglu`: Megatron's fusion, on CUDA alone; without it silu's result and the gate's other factor, f each, are
    saved as well. TransformerEngine keeps its norms' input in w bytes, the attention's output once and its own k and v
    alone.
    """
    w, t = WIDTH[dtype], p.tp
    spread = t if p.sequence_parallel else 1
    h, d = spec.hidden_size, spec.kv_channels
    q, kv = spec.num_attention_heads * d / t, spec.num_query_groups * d / t
    norm = 4 * norm_copies  # in float32 the input itself, which the residual keeps
    norms = 2 * (norm * h + 4) / spread + 2 * w * h / spread
    # q, its output twice; k and v, which the context-parallel ranks gather; log-sum-exp in float32
    attention = w * (3 * q + 2 * kv * p.cp) + 4 * q / d
    attention += 4 * d * w + 8 + 16 * p.cp  # cos and sin, of q and of k; int64 indices of the packed rows
    if spec.qk_norm:
        attention += norm * (q + kv) + 4 * (q + kv) / d
    if not spec.num_experts:
        return norms + attention + w * (3 if fused_swiglu else 5) * spec.ffn_hidden_size / t
    experts = expert_activations(spec, p, dtype, fused_swiglu=fused_swiglu)
    return norms + attention + experts + 5 * spec.num_experts / t


def expert_activations(spec: ModelSpec, p: ParallelConfig, dtype: str, *, fused_swiglu: bool = True) -> float:
    """Of `layer_activations` what the experts' rows make of it, if every rank gets as many rows as it sends; it grows
    with the rows: a rank whose experts get twice as many saves it twice. 0 without experts."""
    if not spec.num_experts:
        return 0.0
    w = WIDTH[dtype]
    # The routed token; the parts of SwiGLU as in a dense layer, and unfused its product with the probability; indices.
    row = w * spec.hidden_size + w * (3 if fused_swiglu else 6) * spec.moe_ffn_hidden_size + 24
    return spec.router_topk * row / p.tp


def attention_scores(spec: ModelSpec, p: ParallelConfig, dtype: str, length: float) -> float:
    """Bytes of one layer's attention scores of a sequence of `length` on a context-parallel rank, which no figure here
    contains: torch's attention may build them where a mask keeps it from its flash kernels, as under context
    parallelism without TransformerEngine (policy/attention.py)."""
    return WIDTH[dtype] * spec.num_attention_heads / p.tp * length * length / p.cp


def kept_activations(
    spec: ModelSpec,
    p: ParallelConfig,
    dtype: str,
    recompute: str,
    *,
    norm_copies: int = 1,
    fused_swiglu: bool = True,
) -> float:
    """Saved bytes of one layer for each token of this context-parallel rank until its backward pass comes.

    full: the layer's input. selective: Megatron keeps q, k and the buffer that v lies in, and drops the attention's own
    output and log-sum-exp, but the projection keeps its input: where no scores are kept nothing is gained.
    """
    if recompute == "full":
        return WIDTH[dtype] * spec.hidden_size / (p.tp if p.sequence_parallel else 1)
    layer = layer_activations(spec, p, dtype, norm_copies=norm_copies, fused_swiglu=fused_swiglu)
    if recompute == "selective":
        kv = spec.num_query_groups * spec.kv_channels / p.tp
        layer += WIDTH[dtype] * kv * (3 - 2 * p.cp) - 4 * spec.num_attention_heads / p.tp - 8 - 16 * p.cp
    return layer


def saved_activations(
    spec: ModelSpec, p: ParallelConfig, dtype: str, recompute: str, tokens: int, layers: float, micro_batches: float
) -> float:
    """Bytes saved at the peak by a stage that has `layers` layers' worth of micro-batches of `tokens` in flight: what
    each keeps, with full recomputation one layer whole while it is computed again, and a stage's input for every
    micro-batch."""
    here = tokens / p.cp
    again = layer_activations(spec, p, dtype) * here if recompute == "full" else 0.0
    entry = WIDTH[dtype] * spec.hidden_size * here / (p.tp if p.sequence_parallel else 1)
    return layers * kept_activations(spec, p, dtype, recompute) * here + again + micro_batches * entry


def in_flight(p: ParallelConfig, num_layers: int, stage: int, micro_batches: int) -> tuple[float, float]:
    """(layers' worth of saved activations, micro-batches) that stage `stage` holds at once.

    1F1B: min(m, pp - stage) micro-batches of a stage's layers. Interleaved, in chunks of layers: 2 (pp - stage - 1) +
    (vpp - 1) pp + 1, so for the first stage L (1 + (pp - 1) / (pp vpp)), [K] section 4.2.3; [N] section 2.2; [M]
    pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    layers = num_layers / (p.pp * p.vpp)
    chunks = p.pp - stage
    if p.vpp > 1:
        chunks = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    chunks = min(chunks, micro_batches * p.vpp)
    return chunks * layers, chunks / p.vpp


def head_memory(
    spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: int, chunk_tokens: int | None, backend: str
) -> float:
    """Bytes of the policy head on the last stage over its saved input: kernels/chunked.py.

    Hidden states of all tokens of the rank in four roles (gathered, response rows, trained rows, their gradient) in
    `dtype`; and the larger of the chunk's buffers (float32 logits within WORKSPACE_BYTES, its rows, its dX) and the
    zeros that stand for the weight's gradient, which itself goes into main_grad.
    """
    here, w, h = tokens / p.cp, WIDTH[dtype], spec.hidden_size
    columns = spec.padded_vocab(p.tp) // p.tp
    row = 4 * columns * (2 if backend == "torch" else 1)
    rows = min(here, chunk_tokens or chunk_size(row))
    return 4 * w * h * here + max(rows * (row + (w + 4) * h), w * h * columns)


def backward_memory(spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: int) -> float:
    """Bytes of what the backward pass of one layer holds besides saved tensors: gradients of the widest activations (4
    of SwiGLU's parts), of a layer's input and, under sequence parallelism, the gathered input; and the gradient of the
    largest weight before it is added to main_grad. An allowance, not a count."""
    here, w, h = tokens / p.cp, WIDTH[dtype], spec.hidden_size
    dense, experts = _layer(spec, p.tp, p.ep)
    if spec.num_experts:
        wide = 4 * spec.moe_ffn_hidden_size * spec.router_topk / p.tp + 2 * h * spec.router_topk / p.tp
    else:
        wide = 4 * spec.ffn_hidden_size / p.tp
    largest = max(*dense, *experts, spec.padded_vocab(p.tp) // p.tp * h)
    return w * (here * (wide + 3 * h) + largest)


# Servers


def linear_width(dtype: str, quantization: str | None) -> float:
    """Bytes that a server has for an element of a linear layer's weight. `quantization`: rollout.quantization."""
    return WIDTH[dtype] if quantization is None else QUANTIZED_BYTES


@functools.lru_cache(maxsize=512)
def server_bytes(spec: ModelSpec, tp: int, dtype: str, quantization: str | None) -> int:
    """Of the weights on one rank of a server: its share of every matrix (experts are cut in width), whole norms, and
    key and value heads copied where there are fewer than ranks."""
    groups = max(spec.num_query_groups, tp) / spec.num_query_groups
    total = 0.0
    for name, shape in huggingface_shapes(spec).items():
        nbytes = math.prod(shape) * (linear_width(dtype, quantization) if is_quantized(name) else WIDTH[dtype])
        if ".k_proj." in name or ".v_proj." in name:
            total += nbytes * groups / tp
        elif len(shape) == 2 and "mlp.gate.weight" not in name:
            total += nbytes / tp
        else:
            total += nbytes / tp if ".q_proj.bias" in name else nbytes
    return round(total)


def kv_bytes_a_token(spec: ModelSpec, tp: int, dtype: str) -> float:
    """On one rank of a server: keys and values of every layer, heads spread over the ranks (at least one each)."""
    heads = max(1, spec.num_query_groups / tp)
    return 2 * spec.num_layers * heads * spec.kv_channels * WIDTH[dtype]


# Host and disk


def checkpoint_bytes(spec: ModelSpec, dtype: str) -> int:
    """Weights, float32 main parameters and two moments: docs/checkpoints.md."""
    return model_elements(spec) * (WIDTH[dtype] + 12)


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    return model_elements(spec) * WIDTH[dtype]


ROLLOUT_TOKEN = 76  # bytes a token as Python lists hold it: an int (36), a small int (8), a float (32)


def save_staging(share: int, dtype: str) -> int:
    """Host bytes of a rank in a save in the background: a copy of the weights and 12 bytes of the optimizer's state for
    each of the `share` parameters that it writes; docs/checkpoints.md. Another save copies a tensor at a time."""
    return (WIDTH[dtype] + 12) * share


def load_staging(shard: int) -> int:
    """Host bytes of a rank in a load: 12 for each parameter of its shard; docs/checkpoints.md."""
    return 12 * shard
