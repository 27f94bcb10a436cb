"""The planner's formulas of parameters, memory and times, pure functions of shapes and layout. Times are those at the
rates of planning/rates.py, and of links at their stated rates.

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

from dynamo_megatron.config import Config, LoraConfig, ParallelConfig
from dynamo_megatron.kernels.chunked import chunk_size
from dynamo_megatron.models.adapters import adapted_linears, adapted_weights, adapter_elements
from dynamo_megatron.models.fp8 import QUANTIZED_BYTES, is_quantized
from dynamo_megatron.models.mapping import huggingface_names, huggingface_shapes, is_expert, is_sharded
from dynamo_megatron.models.server_layout import server_cut
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning.hardware import GPU, Cluster
from dynamo_megatron.planning.rates import rate
from dynamo_megatron.policy.batch import SequenceCost
from dynamo_megatron.rollout.servers.server import shares_memory

WIDTH = {"bfloat16": 2, "float32": 4}  # bytes an element
GRADIENT = 4  # bytes: main_grad is float32 (grad_reduce_in_fp32)
ADAM = 30  # bytes that a step reads and writes of an element: its gradient, float32 state twice, the parameter
HOST_ADAM = 36  # the same in host memory, with gradient and result on their way
FP8_RATE = 2  # times a GPU's bfloat16 rate, by the makers' tables


@functools.lru_cache(maxsize=512)
def stage_parameters(spec: ModelSpec, p: ParallelConfig, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dense, experts): elements of each parameter on a rank of pipeline stage `stage` (from 0).

    tests/planning/test_memory.py holds it to the model that Megatron builds, rank by rank.
    """
    shapes, layers = huggingface_shapes(spec), p.stage_layers(spec.num_layers)[stage]
    vocabulary = spec.padded_vocab(p.tp) // p.tp * spec.hidden_size
    dense, experts = [], []
    for name, parts in spec.layer_names.items():
        elements = sum(math.prod(shapes[f"model.layers.0.{part}"]) for part in parts)
        if is_expert(name):
            experts.append(elements)
        else:
            dense.append(elements // p.tp if is_sharded(f"decoder.layers.0.{name}") else elements)
    dense, experts = dense * layers, experts[: len(experts) // p.ep] * layers  # experts are alike, and whole
    if stage == 0:
        dense.append(vocabulary)
    if stage == p.pp - 1:
        dense.append(spec.hidden_size)
        if not spec.tied or p.pp > 1:  # a tied head on another stage is a copy of the embedding
            dense.append(vocabulary)
    return tuple(dense), tuple(experts)


@functools.lru_cache(maxsize=512)
def model_elements(spec: ModelSpec) -> int:
    """Parameters of the whole model, as its Hugging Face folder holds them (a tied head once, no padding)."""
    return sum(math.prod(shape) for shape in huggingface_shapes(spec).values())


def expert_elements(spec: ModelSpec) -> int:
    """Of all experts; 0 for a dense model."""
    return sum(stage_parameters(spec, ParallelConfig(), 0)[1])


def active_elements(spec: ModelSpec) -> int:
    """Parameters that a token passes: of a mixture of experts the chosen ones alone."""
    idle = spec.num_experts - spec.router_topk
    return model_elements(spec) - (expert_elements(spec) // spec.num_experts * idle if spec.num_experts else 0)


@dataclass(frozen=True)
class StageState:
    """What each rank of a pipeline stage holds all the time, without the padding of Megatron's buffers."""

    dense: int  # parameters, elements, adapters included
    experts: int
    trained: tuple[int, int]  # of these, (dense, experts)
    owned: float  # of the parameters whose optimizer state the rank has, elements
    parameters: float  # bytes
    gradients: float
    optimizer: float
    host: float  # bytes of the optimizer in host memory
    pinned: float  # bytes of pinned host memory for copies of parameters and optimizer state
    reference: float  # bytes of pinned host memory for a frozen model

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def stage_state(
    spec: ModelSpec,
    p: ParallelConfig,
    dtype: str,
    ranks: int,
    stage: int,
    lora: LoraConfig | None = None,
    *,
    cpu_offload: bool = False,
) -> StageState:
    """Stage `stage` (from 0) of `ranks` in all: parameters in `dtype`, float32 gradients, and of a rank's share the
    optimizer's state: two float32 moments and, for bfloat16, the float32 main parameters. [Z]: 2 + 4 + 12 / ranks bytes
    a parameter; [M] optimizer/distrib_optimizer.py. dp x cp ranks share dense parameters. With `lora` the adapters
    alone have gradients and optimizer state. With `cpu_offload` (policy/host_adam.py) the state is in host memory, main
    parameters in any case.

    policy/offload.py copies the parameters in a buffer for each chunk and kind, and the optimizer's state tensor by
    tensor; a parameter that is larger than a rank's share is in pieces. Frozen parameters are in no buffer.
    """
    width, state = WIDTH[dtype], 12 if dtype == "bfloat16" else 8
    whole = stage_parameters(spec, p, stage)
    kinds, frozen = whole, ()
    if lora is not None:
        layer = adapter_elements(spec, lora, p.tp)  # as if in one piece: they are small
        kinds, frozen = ((layer,) * p.stage_layers(spec.num_layers)[stage], ()), (*whole[0], *whole[1])
    sharing = max(1, ranks // (p.tp * p.pp)), max(1, ranks // (p.pp * p.ep))
    owned, copied = 0.0, float(sum(pinned(n * width) for n in frozen))
    for parameters, among in zip(kinds, sharing, strict=True):
        if elements := sum(parameters):
            owned += elements / among
            pieces = [(n, math.ceil(n * p.vpp * among / elements)) for n in parameters]
            copied += p.vpp * pinned(elements / p.vpp * width)
            copied += (not cpu_offload) * state // 4 * sum(count * pinned(4 * n / count) for n, count in pieces) / among
    (dense, experts), trained = map(sum, whole), (sum(kinds[0]), sum(kinds[1]))
    dense += trained[0] if frozen else 0
    return StageState(
        dense=dense,
        experts=experts,
        trained=trained,
        owned=owned,
        parameters=(dense + experts) * width,
        gradients=sum(trained) * GRADIENT,
        optimizer=0.0 if cpu_offload else owned * state,
        host=owned * 12 if cpu_offload else 0.0,
        pinned=copied,
        reference=sum(pinned(width * n) for parameters in whole for n in parameters),
    )


def pinned(size: float) -> int:
    """Bytes that torch allocates for `size` bytes of pinned memory: the next power of two (its
    CachingHostAllocator)."""
    return 1 << (math.ceil(size) - 1).bit_length()


def layer_activations(spec: ModelSpec, p: ParallelConfig, dtype: str, lora: LoraConfig | None = None) -> float:
    """Saved bytes of one layer for each token that this context-parallel rank has, without recomputation.

    [K] counts 34 h + 5 a s (a heads, sequences of s tokens) of a GELU layer. Here it is, with w bytes an element, of
    Megatron's modules as policy/model.py configures them on CUDA: both norms' input 2 (w h) and output 2 (w h); q, k, v
    and their attention's output; SwiGLU's input, fc1's output 2 f, and its result f. Context-parallel ranks gather k
    and v, and a call for each length has its output twice.

    Of experts it is what their rows make of it, if every rank gets as many rows as it sends. An adapter keeps the
    values between its two matrices, and its linear's input, which is counted already.
    """
    w, t = WIDTH[dtype], p.tp
    spread = t if p.sequence_parallel else 1
    h, d = spec.hidden_size, spec.kv_channels
    q, kv = spec.num_attention_heads * d / t, spec.num_query_groups * d / t
    norms = 2 * (2 * w * h + 4) / spread
    if spec.pre_norms and spec.post_norms:  # what is added to the residual is not kept
        norms += 2 * (w * h + 4) / spread
    attention = w * (2 * q + 2 * kv * p.cp) + 4 * q / d  # log-sum-exp in float32
    if p.cp > 1 or dtype == "float32":  # a call for each length
        attention += w * q + 8 + 16 * p.cp  # int64 indices of the packed rows
    if spec.qk_norm:
        attention += w * (q + kv) + 4 * (q + kv) / d
    if spec.zero_centered_norms:  # four norms and those of q and k save their input in float32
        norms, attention = norms + (4 - w) * 4 * h / spread, attention + (4 - w) * (q + kv)
    if lora is not None:
        attention += w * lora.rank * len(adapted_linears(lora))
    if not spec.num_experts:
        return norms + attention + w * 3 * spec.ffn_hidden_size / t
    row = w * h + w * 3 * spec.moe_ffn_hidden_size + 24  # the routed token; the parts of SwiGLU; indices
    return norms + attention + spec.router_topk * row / t + 5 * spec.num_experts / t


def saved_activations(
    spec: ModelSpec,
    p: ParallelConfig,
    dtype: str,
    recompute: str,
    tokens: int,
    layers: float,
    micro_batches: float,
    lora: LoraConfig | None = None,
) -> float:
    """Bytes saved at the peak by a stage that has `layers` layers' worth of micro-batches of `tokens` in flight: of
    each all that autograd keeps, with full recomputation the layer's input and one layer whole while it is computed
    again, and a stage's input for every micro-batch. Selective recomputation drops the attention's scores, and none are
    kept."""
    here, layer = tokens / p.cp, layer_activations(spec, p, dtype, lora)
    entry = WIDTH[dtype] * spec.hidden_size / (p.tp if p.sequence_parallel else 1)
    kept, again = (entry, layer) if recompute == "full" else (layer, 0.0)
    return (layers * kept + again + micro_batches * entry) * here


def in_flight(p: ParallelConfig, num_layers: int, stage: int, micro_batches: int) -> tuple[float, float]:
    """(layers' worth of saved activations, micro-batches) that stage `stage` holds at once.

    1F1B: min(m, pp - stage) micro-batches of a stage's layers. Interleaved, in chunks of layers: 2 (pp - stage - 1) +
    (vpp - 1) pp + 1, so for the first stage L (1 + (pp - 1) / (pp vpp)), [K] section 4.2.3; [N] section 2.2; [M]
    pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    layers = p.stage_layers(num_layers)[stage] / p.vpp
    chunks = p.pp - stage
    if p.vpp > 1:
        chunks = 2 * (p.pp - stage - 1) + (p.vpp - 1) * p.pp + 1
    chunks = min(chunks, micro_batches * p.vpp)
    return chunks * layers, chunks / p.vpp


def head_memory(
    spec: ModelSpec,
    p: ParallelConfig,
    dtype: str,
    tokens: int,
    chunk_tokens: int | None,
    backend: str,
    *,
    frozen: bool = False,
) -> float:
    """Bytes of the policy head on the last stage over its saved input: kernels/chunked.py.

    Hidden states of all tokens of the rank in four roles (gathered, response rows, trained rows, their gradient) in
    `dtype`; and the larger of the chunk's buffers (float32 logits within WORKSPACE_BYTES, its rows, its dX) and the
    zeros that stand for the weight's gradient, which itself goes into main_grad; a `frozen` weight has none.
    """
    here, w, h = tokens / p.cp, WIDTH[dtype], spec.hidden_size
    columns = spec.padded_vocab(p.tp) // p.tp
    row = 4 * columns * (2 if backend == "torch" else 1)
    rows = min(here, chunk_tokens or chunk_size(row))
    return 4 * w * h * here + max(rows * (row + (w + 4) * h), 0 if frozen else w * h * columns)


def backward_memory(spec: ModelSpec, p: ParallelConfig, dtype: str, tokens: int) -> float:
    """Bytes of what the backward pass of one layer holds besides saved tensors: gradients of the widest activations (4
    of SwiGLU's parts), of a layer's input and, under sequence parallelism, the gathered input; and the gradient of the
    largest weight before it is added to main_grad. An allowance, not a count."""
    here, w, h = tokens / p.cp, WIDTH[dtype], spec.hidden_size
    if spec.num_experts:
        wide = 4 * spec.moe_ffn_hidden_size * spec.router_topk / p.tp + 2 * h * spec.router_topk / p.tp
    else:
        wide = 4 * spec.ffn_hidden_size / p.tp
    largest = max(map(max, filter(None, stage_parameters(spec, p, 0))))
    return w * (here * (wide + 3 * h) + largest)


@functools.lru_cache(maxsize=512)
def server_bytes(
    spec: ModelSpec, tp: int, dtype: str, quantization: str | None, only: frozenset[str] | None = None
) -> int:
    """Of the weights on one rank of a server: its share of every matrix (experts are cut in width), whole norms, and
    key and value heads copied where there are fewer than ranks. `only`: the Hugging Face tensors that are counted."""
    parts, total = {"whole": 1, "kv": min(tp, spec.num_query_groups)}, 0.0
    for name, shape in huggingface_shapes(spec).items():
        if only is not None and name not in only:
            continue
        quantized = quantization is not None and is_quantized(name)
        nbytes = math.prod(shape) * (QUANTIZED_BYTES if quantized else WIDTH[dtype])
        total += nbytes / parts.get(server_cut(spec, name), tp)
    return round(total)


def kv_bytes_a_token(spec: ModelSpec, tp: int, dtype: str) -> float:
    """On one rank of a server: keys and values of every layer, heads spread over the ranks (at least one each)."""
    heads = max(1, spec.num_query_groups / tp)
    return 2 * spec.num_layers * heads * spec.kv_channels * WIDTH[dtype]


def checkpoint_bytes(spec: ModelSpec, dtype: str, lora: LoraConfig | None = None) -> int:
    """Weights (with `lora` those of the adapters), float32 main parameters and two moments: docs/checkpoints.md."""
    elements = model_elements(spec) if lora is None else spec.num_layers * adapter_elements(spec, lora, 1)
    return elements * (WIDTH[dtype] + 12)


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    return model_elements(spec) * WIDTH[dtype]


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

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
    policy/batch.py.
    """
    cost = SequenceCost.of_model(spec)
    return 2 * sum(count * cost(length) for count, length in lengths)


def training_seconds(
    config: Config, spec: ModelSpec, cluster: Cluster, length: float, stages: Sequence[StageState], micro_batches: int
) -> tuple[float, float]:
    """(log-probs, those of frozen models too; update). `length`: tokens of the mean sequence; `micro_batches`: of an
    update, on each rank.

    A pass takes as long as the GPU has work, with the gaps between its kernels, or as the host launches that, whichever
    is longer. The GPU computes, and reads and writes the layers' activations and in a step the optimizer's state, with
    `optimizer.cpu_offload` the host does.

    A rank sends, of its `own` tokens in a forward pass: two all-reduces a layer (or a reduce-scatter and an all-gather
    each), 2 (tp - 1) / tp of the hidden states apiece, [K] section 4.2.1, of a mixture of experts one; its keys and
    values to the other context-parallel ranks; each token to its experts and back. The gradients come back the same
    way, and sequence parallelism's backward gathers each column-parallel layer's input besides: three halves of the
    forward's ([M] tensor_parallel/layers.py). Full recomputation repeats the forward.
    """
    p, dtype, gpu = config.parallel, config.model.dtype, cluster.gpu
    layers = max(p.stage_layers(spec.num_layers))
    w, updates = WIDTH[dtype], config.algorithm.loss.mini_batches  # log-probs run through all without a stop
    own = config.rollout_budget * length * p.model_ranks / cluster.gpus / p.cp
    reduces = 1 if spec.num_experts else 2
    hidden = layers * reduces * 2 * (p.tp - 1) / p.tp * w * spec.hidden_size * own / cluster.link(p.tp)
    keys_and_values = 2 * spec.num_query_groups * spec.kv_channels / p.tp * w * own
    others = layers * (p.cp - 1) * keys_and_values / cluster.link(p.cp, p.tp)
    if spec.num_experts:
        copies = spec.router_topk * own / p.tp
        others += layers * 2 * (p.ep - 1) / p.ep * copies * spec.hidden_size * w / cluster.link(p.ep)
    again = 1 if config.trainer.recompute == "full" else 0
    of_token = 2 if config.model.lora is not None else 3  # products: forward, an input's gradient and a weight's
    products = 2 * SequenceCost.of_model(spec).linear * config.rollout_budget * length
    attention = forward_flops(spec, [(config.rollout_budget, length)]) - products
    forward = (products / rate("products", gpu) + attention / rate("attention", gpu)) / cluster.gpus
    forward *= layers * p.pp / spec.num_layers  # the fullest stage's share
    forward += rate("passing") * layers * own * layer_activations(spec, p, dtype) / rate("copies", gpu)
    # One forward pass of log-probs (2N), three of an update (6N), four with full recomputation (8N); [N]. Gradients are
    # zeroed and their norm is read. The products of adapters are not counted.
    on_host, memory = config.optimizer.cpu_offload, rate("copies", gpu)
    adam = HOST_ADAM / rate("host memory") if on_host else ADAM / memory
    step = max(2 * stage.gradients / memory + adam * stage.owned for stage in stages)
    once = forward / rate("busy") + hidden + others
    often = ((of_token + again) * forward + updates * step) / rate("busy")
    often += ((2.5 if p.cuts_sequences else 2) + again) * hidden + (2 + again) * others
    launched = updates * micro_batches * layers
    once = max(once, launched * rate("forward launches"))
    adapters = 0 if config.model.lora is None else len(adapted_linears(config.model.lora)) * rate("adapter")
    often = max(often, launched * (rate("launches") + adapters + again * rate("forward launches")))
    # Reduce-scatter of the float32 gradients and all-gather of the parameters among the ranks that share them; [Z].
    dp_cp, expert_dp = cluster.gpus // (p.tp * p.pp), cluster.gpus // (p.pp * p.ep)
    reduce = max(
        (dp_cp - 1) / dp_cp * stage.trained[0] * (GRADIENT + w) / cluster.link(dp_cp, p.tp)
        + (expert_dp - 1) / expert_dp * stage.trained[1] * (GRADIENT + w) / cluster.link(expert_dp, p.ep)
        for stage in stages
    )
    idle = (p.pp - 1) / (micro_batches * p.vpp)  # the pipeline's bubble over its working time; [N] section 2.2
    passes = config.algorithm.measures_first + len(config.frozen_models) + config.trained_models - 1
    update = often * (1 + idle) + updates * reduce
    return passes * once * (1 + idle / updates), config.trained_models * update


def decode_seconds(config: Config, spec: ModelSpec, gpu: GPU, sequences: float, context: float) -> float:
    """Of one token of each of `sequences` sequences on one server: its weights (of a mixture of experts those that some
    sequence chose) and their keys and values are read once, or their products computed, and each layer has its own
    price (launches, small kernels)."""
    dtype, tp, quantization = config.model.dtype, config.rollout.tp, config.rollout.quantization
    read = server_bytes(spec, tp, dtype, quantization)
    read += sequences * context * kv_bytes_a_token(spec, tp, dtype)
    if spec.num_experts:
        unread = (1 - spec.router_topk / spec.num_experts) ** sequences
        read -= expert_elements(spec) / tp * unread * (WIDTH[dtype] if quantization is None else QUANTIZED_BYTES)
    products = 2 * sequences * SequenceCost.of_model(spec).linear
    graphs = "--disable-cuda-graph" not in config.rollout.server_args
    layers = spec.num_layers * rate("decode" if graphs else "decode without graphs")
    return layers + max(read / rate("copies", gpu), products / (tp * server_flops(config, gpu)))


def server_flops(config: Config, gpu: GPU) -> float:
    """A second of a GPU of a server."""
    return rate("products", gpu) * (1 if config.rollout.quantization is None else FP8_RATE)


def sync_seconds(config: Config, spec: ModelSpec, server_rank: float) -> float:
    """Of a weight sync with its checksums; `server_rank`: bytes of the weights of a rank of a server. With adapters it
    is one after the first, which may be of what they change alone (weight_sync/sync.py)."""
    rollout, dtype, lora = config.rollout, config.model.dtype, config.model.lora
    if rollout.sync.transport == "disk":
        return weight_bytes(spec, dtype) / rate("disk")
    if lora is not None and rollout.proof.checksums and not shares_memory(rollout, gpus=True):
        changed = (part for name in adapted_weights(spec, lora) for part in huggingface_names(spec, name))
        server_rank = server_bytes(spec, rollout.tp, dtype, rollout.quantization, frozenset(changed))
    return server_rank / rate("ipc")
