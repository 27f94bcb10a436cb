"""A config's layout on a cluster: memory of every rank, servers, host and disk, floor times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.models.fp8 import largest_weights
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning import formulas, time_formulas
from dynamo_megatron.planning.formulas import Static
from dynamo_megatron.planning.hardware import GIB, GPU, Cluster
from dynamo_megatron.planning.host import Host, host_memory, shares_memory

# A training rank's CUDA context, NCCL's and cuBLAS's buffers, what the allocator cannot use: an allowance, never
# measured.
RESERVED = 4 * GIB
# A server beside its weights and KV cache: activations, CUDA graphs, context, NCCL. What SGLang keeps free of a GPU of
# more than 60 GiB at least where it chooses --mem-fraction-static itself (srt/arg_groups/memory_hook.py).
SERVER_WORKING = 10 * GIB
# Of that, once it has released graphs and activations: context and NCCL's buffers. An allowance as well.
SERVER_REMAINS = 2 * GIB
PUSH_BUCKETS, IPC_BUCKETS = 3, 4  # of rollout.sync.bucket_bytes, that a sender needs in a push: docs/resharding.md
SLOWEST = 7  # times the floor of log-probs and update: published trainers reach 14 % of stated rates at the least
# Bytes of device memory that weight_sync/proof.py moves for each byte it hashes: 46 operations on words of 4
# bytes, each of which reads and writes at least one int64.
HASH_TRAFFIC = 46 * 16 / 4
DISK_RATE = 1e9  # bytes a second that a node writes of a checkpoint: an allowance
PROMPT_TOKENS = 256  # of the mean prompt, where its limit allows as many
FP8_RATE = 2  # times a GPU's bfloat16 rate, by the makers' tables
# Bytes for each element of an FP8 weight: a sender's copies in bfloat16 and float32; in SGLang's checksum values,
# scales and products in float32, and these in bfloat16 (block_quant_dequant of layers/quantization/fp8_utils.py).
QUANTIZING, CHECKING = 6, 14


@dataclass(frozen=True)
class Workload:
    """What a step is reckoned with: tokens of the mean prompt and response, and of the longest sequence."""

    prompt: float
    response: float
    longest: int

    @property
    def mean(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage. `training` names what is there at the peak of an update; `others`: the
    sums of the phases that a colocated server has its part in (weight_sync/memory.py), none without one."""

    stage: int
    dense: int  # parameters, elements
    experts: int
    static: Static
    training: Mapping[str, float]
    others: Mapping[str, float]

    @property
    def peak(self) -> float:
        return max(sum(self.training.values()), *self.others.values(), 0.0)


@dataclass(frozen=True)
class Servers:
    """Of each server rank bytes; of each server tokens and sequences."""

    count: int
    tp: int
    weights: float
    pool: float
    kv_bytes_a_token: float
    tokens: float  # that the pool holds
    longest_sequences: float  # of the full context that it holds
    running: float  # sequences at once, of the mean length

    @property
    def gpus(self) -> int:
        return self.count * self.tp

    @property
    def peak(self) -> float:
        """Bytes on a GPU while it generates."""
        return self.weights + self.pool + SERVER_WORKING


@dataclass(frozen=True)
class Times:
    """Seconds of a step, each at the hardware's stated rates: nothing is faster."""

    generate: float
    logprobs: float
    update: float
    push: float
    communication: float  # of logprobs and update
    bubble: float  # of logprobs and update
    overlap: bool = False  # servers generate while the ranks train: `rollout.max_staleness`

    @property
    def waits(self) -> float:
        """Seconds of a step in which the ranks wait for rollouts; below 0: in which the servers wait for the ranks."""
        return self.generate - self.logprobs - self.update

    @property
    def training(self) -> float:
        return self.logprobs + self.update + self.push

    @property
    def step(self) -> float:
        if self.overlap:
            return max(self.generate, self.logprobs + self.update) + self.push
        return self.generate + self.training


@dataclass(frozen=True)
class Plan:
    config: Config
    spec: ModelSpec
    cluster: Cluster
    work: Workload
    dp: int
    micro_batches: int  # of an update, on each rank
    stages: list[StageMemory]
    servers: Servers | None
    times: Times
    host: Host
    checkpoint: int
    pushed: int  # bytes of one copy of the weights

    @property
    def peak(self) -> float:
        return max(stage.peak for stage in self.stages) + RESERVED

    @property
    def fits(self) -> bool:
        return self.peak <= self.cluster.gpu.memory and not self.server_too_large and not self._server_short

    @property
    def stop_before(self) -> int:
        """Seconds that a job should be told before its time limit: from the last look for a stop, at the end of
        generation, to the end of the save after the step, in whole tens of minutes."""
        save = self.checkpoint / self.cluster.nodes / DISK_RATE
        return math.ceil((SLOWEST * self.times.training + save) / 600) * 600

    @property
    def longest_response(self) -> float:
        """Seconds that a response of rollout.max_new_tokens takes at least, beside as many others as run at once."""
        return self._response(self.servers.running) if self.servers is not None else 0.0

    @property
    def timeout_too_short(self) -> bool:
        """No response of rollout.max_new_tokens can end within rollout.timeout, even alone on its server."""
        return self.servers is not None and self.config.rollout.timeout_of() < self._response(1.0)

    def _response(self, running: float) -> float:
        """Seconds that a response of rollout.max_new_tokens takes at least, `running` at once on its server."""
        gpu, work = self.cluster.gpu, self.work
        shape = self.spec, self.config.model.dtype, self.servers.tp, max(1.0, running), work.prompt + work.response / 2
        server = _server_rate(self.config, gpu), gpu.memory_bandwidth, self.config.rollout.quantization
        return self.config.rollout.max_new_tokens * time_formulas.decode_seconds(*shape, *server)

    @property
    def hashed(self) -> float:
        """Bytes that the busiest sender of a push hashes to prove all weights: a stage's, or its experts of a rank."""
        held = max(stage.dense * self.config.parallel.tp + stage.experts for stage in self.stages)
        return held * formulas.WIDTH[self.config.model.dtype]

    @property
    def hash_seconds(self) -> float:
        return self.hashed * HASH_TRAFFIC / self.cluster.gpu.memory_bandwidth

    @property
    def idle_gpus(self) -> int:
        """GPUs of the ranks that have no server's rank while colocated servers generate."""
        if self.servers is None or self.config.rollout.placement != "colocated":
            return 0
        return self.cluster.gpus - self.servers.gpus

    @property
    def server_too_large(self) -> bool:
        """On a GPU of its own; with ranks beside it `peak` says it."""
        return self.servers is not None and self.servers.peak > self.cluster.gpu.memory

    @property
    def _server_short(self) -> bool:
        return self.servers is not None and self.servers.longest_sequences < 1


def workload(config: Config, spec: ModelSpec, response: int | None) -> Workload:
    """Raises ConfigError where prompt and response do not fit the model, or the mean response not its limit."""
    try:
        limit = max_prompt_length(config, spec)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    most = config.rollout.max_new_tokens
    if response is not None and response > most:
        raise ConfigError(f"--response-tokens: {response} is above rollout.max_new_tokens {most}")
    return Workload(min(PROMPT_TOKENS, limit), response or most / 2, limit + most)


def make_plan(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> Plan:
    """The layout must fit model and cluster (`check_ranks`). Raises ConfigError where the servers do not."""
    config = config.with_servers(cluster.gpus, cluster.nodes)
    p, t, dtype = config.parallel, config.trainer, config.model.dtype
    dp = cluster.gpus // p.model_ranks
    tokens = max(t.micro_batch_tokens, work.longest)  # a longer sequence has a micro-batch to itself
    updates = min(config.algorithm.loss.mini_batches, config.batch_prompts)
    micro_batches = _micro_batches(config, dp, work.mean, updates)
    most = _micro_batches(config, dp, work.longest, updates)  # responses may grow: memory is for the longest
    servers = _servers(config, spec, cluster, work)
    stages = []
    for stage in range(p.pp):
        state = formulas.stage_state(spec, p, dtype, cluster.gpus, stage)
        static = state.static
        layers, batches = formulas.in_flight(p, spec.num_layers, stage, most)
        saved = formulas.saved_activations(spec, p, dtype, t.recompute, tokens, layers, batches)
        passing = formulas.backward_memory(spec, p, dtype, tokens)
        if stage == p.pp - 1:
            head = formulas.head_memory(spec, p, dtype, tokens, config.kernels.chunk_tokens, config.kernels.backend)
            passing = max(passing, head)
        # Adam's temporaries, one float32 value for each of its elements where it is torch's, come after the backward.
        working = max(saved + passing, 4 * static.optimizer_elements)
        training = {
            "parameters": static.parameters,
            "gradients": static.gradients,
            "optimizer": static.optimizer,
            "activations": min(saved, working),
            "head, backward": working - min(saved, working),
        }
        others: dict[str, float] = {}
        if servers is not None and config.rollout.placement == "colocated":
            training["server"], others = _shared(config, spec, static, servers)
        stages.append(StageMemory(stage, state.dense, state.experts, static, training, others))
    times = _times(config, spec, cluster, work, stages, servers, micro_batches, updates)
    return Plan(
        config=config,
        spec=spec,
        cluster=cluster,
        work=work,
        dp=dp,
        micro_batches=micro_batches,
        stages=stages,
        servers=servers,
        times=times,
        host=host_memory(config, spec, cluster.gpus, cluster.gpus_per_node, work.mean),
        checkpoint=formulas.checkpoint_bytes(spec, dtype),
        pushed=formulas.weight_bytes(spec, dtype),
    )


def _micro_batches(config: Config, dp: int, length: float, updates: int) -> int:
    """Of an update on each rank, if prompt and response have `length` tokens on average."""
    p, of_update = config.parallel, config.rollout_budget * length / updates
    count = max(1, -(-int(of_update) // (dp * config.trainer.micro_batch_tokens)))
    return -(-count // p.pp) * p.pp if p.vpp > 1 else count


def _shared(config: Config, spec: ModelSpec, static: Static, servers: Servers) -> tuple[float, dict[str, float]]:
    """Bytes of a colocated server during an update, and what is on the GPU in the other phases."""
    held, sync = servers.peak, config.rollout.sync
    push = (IPC_BUCKETS if sync.transport in ("auto", "ipc") else PUSH_BUCKETS) * sync.bucket_bytes
    if config.rollout.quantization is not None:
        tensor, parameter = largest_weights(spec, servers.tp)
        push = max(push + QUANTIZING * tensor, CHECKING * parameter)  # the checksums come after the push
    if not shares_memory(config):
        return held, {"generate": static.total + held, "push": static.total + held + push, "save": static.total + held}
    return SERVER_REMAINS, {
        "generate": held,
        "push": static.parameters + servers.weights + push + SERVER_REMAINS,
        "save": static.total + servers.weights + SERVER_REMAINS,
    }


def _servers(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> Servers | None:
    """None where no server of ours runs on a GPU that is known."""
    rollout, gpu, dtype = config.rollout, cluster.gpu, config.model.dtype
    if rollout.engine != "sglang" or rollout.placement == "external":
        return None
    if rollout.quantization is not None and not gpu.fp8_pushes:
        raise ConfigError(
            f"rollout.quantization: SGLang takes no pushes of {rollout.quantization} weights on {gpu.name}; "
            "leave it out"
        )
    heads, groups = spec.num_attention_heads, spec.num_query_groups
    if heads % rollout.tp or (groups % rollout.tp and rollout.tp % groups):
        raise ConfigError(
            f"rollout.tp: {rollout.tp} ranks of a server can't share {heads} attention and {groups} key/value heads"
        )
    if rollout.tp > cluster.gpus_per_node:
        raise ConfigError(f"rollout.tp: {rollout.tp} is more than the {cluster.gpus_per_node} GPUs of a node")
    if rollout.placement == "colocated" and rollout.servers % cluster.nodes:
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers can't be spread evenly over {cluster.nodes} nodes; "
            f"give a multiple of {cluster.nodes}"
        )
    if rollout.placement == "colocated" and rollout.servers * rollout.tp > cluster.gpus:
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers of {rollout.tp} GPUs do not fit on {cluster.gpus} GPUs"
        )
    weights = formulas.server_bytes(spec, rollout.tp, dtype, rollout.quantization)
    pool = max(0.0, rollout.memory_fraction * gpu.memory - weights)
    a_token = formulas.kv_bytes_a_token(spec, rollout.tp, dtype)
    share = config.rollout_budget / rollout.servers
    mean_held = work.prompt + work.response / 2
    running = min(share, rollout.concurrency, pool / a_token / mean_held)
    return Servers(
        count=rollout.servers,
        tp=rollout.tp,
        weights=weights,
        pool=pool,
        kv_bytes_a_token=a_token,
        tokens=pool / a_token,
        longest_sequences=pool / a_token / work.longest,
        running=running,
    )


def _times(
    config: Config,
    spec: ModelSpec,
    cluster: Cluster,
    work: Workload,
    stages: list[StageMemory],
    servers: Servers | None,
    micro_batches: int,
    updates: int,
) -> Times:
    p, gpu, dtype, recompute = config.parallel, cluster.gpu, config.model.dtype, config.trainer.recompute
    budget, dp = config.rollout_budget, cluster.gpus // p.model_ranks
    forward = time_formulas.forward_flops(spec, [(budget, work.mean)]) / (cluster.gpus * gpu.flops)
    own_tokens = budget * work.mean / dp
    hidden = time_formulas.tensor_parallel_bytes(spec, p, dtype, own_tokens) / cluster.link(p.tp)
    others = time_formulas.context_parallel_bytes(spec, p, dtype, own_tokens) / cluster.link(p.cp, p.tp)
    others += time_formulas.expert_parallel_bytes(spec, p, dtype, own_tokens) / cluster.link(p.ep)
    dp_cp, expert_dp = cluster.gpus // (p.tp * p.pp), cluster.gpus // (p.pp * p.ep)
    reduce = max(
        time_formulas.data_parallel_bytes(s.dense, dtype, dp_cp) / cluster.link(dp_cp, p.tp)
        + time_formulas.data_parallel_bytes(s.experts, dtype, expert_dp) / cluster.link(expert_dp, p.ep)
        for s in stages
    )
    idle = time_formulas.bubble(p, micro_batches)
    exchange_once = time_formulas.exchanges("logprobs", recompute) * (hidden + others)
    exchange_often = time_formulas.exchanges("update", recompute, gathered_again=p.sequence_parallel) * hidden
    exchange_often += time_formulas.exchanges("update", recompute) * others
    once = time_formulas.pass_factor("logprobs", recompute) * forward + exchange_once
    often = time_formulas.pass_factor("update", recompute) * forward + exchange_often
    # The forward passes of the statistics run through all mini-batches one after another.
    idle_once = idle / updates
    generate = push = 0.0
    if servers is not None:
        link = gpu.network if config.rollout.placement == "split" else gpu.nvlink
        push = servers.weights / link
        generate = _generation(config, spec, cluster, work, servers)
    return Times(
        generate=generate,
        logprobs=once * (1 + idle_once),
        update=often * (1 + idle) + updates * reduce,
        push=push,
        communication=exchange_once + exchange_often + updates * reduce,
        bubble=once * idle_once + often * idle,
        overlap=config.rollout.max_staleness > 0,
    )


def _server_rate(config: Config, gpu: GPU) -> float:
    """FLOPs a second of a server's products, at most."""
    return gpu.flops * (1 if config.rollout.quantization is None else FP8_RATE)


def _generation(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload, servers: Servers) -> float:
    """Seconds: all tokens of a server's share with as many sequences as run at once, or its longest response alone."""
    gpu, dtype = cluster.gpu, config.model.dtype
    rate, quantization = _server_rate(config, gpu), config.rollout.quantization

    def decode(sequences: float, context: float) -> float:
        shape = spec, dtype, servers.tp, sequences, context
        return time_formulas.decode_seconds(*shape, rate, gpu.memory_bandwidth, quantization)

    share = config.rollout_budget / servers.count
    running = max(1.0, servers.running)
    prefill = time_formulas.forward_flops(spec, [(config.batch_prompts / servers.count, work.prompt)])
    prefill /= servers.tp * rate
    together = share * work.response / running * decode(running, work.prompt + work.response / 2)
    alone = config.rollout.max_new_tokens * decode(1, work.longest / 2)
    return prefill + max(together, alone)
