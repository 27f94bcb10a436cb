"""A config's layout on a cluster: memory of every rank, servers, host and disk, times."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.data.templates import longest_sequence, max_prompt_length
from dynamo_megatron.models.server_layout import check_server_parallel
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.formulas import StageState, Times
from dynamo_megatron.planning.hardware import GIB, Cluster
from dynamo_megatron.planning.rates import rate
from dynamo_megatron.rollout.servers.server import shares_memory

# A training rank's CUDA context, NCCL's and cuBLAS's buffers, a weight that is merged or quantised for a sync, what the
# allocator cannot use: an allowance.
RESERVED = 4 * GIB
# A server beside its weights and KV cache: activations, CUDA graphs, context, NCCL. What SGLang keeps free of a GPU of
# more than 60 GiB at least where it chooses --mem-fraction-static itself (srt/arg_groups/memory_hook.py).
SERVER_WORKING = 10 * GIB
SERVER_REMAINS = 2 * GIB  # of that, once it has released graphs and activations: an allowance as well
SYNC_BUCKETS, IPC_BUCKETS = 3, 5  # of rollout.sync.bucket_bytes, that a sender needs in a sync
PROCESS_BYTES = 2 * GIB  # host memory of a rank, or of a rank of a server: an allowance
ROLLOUT_TOKEN = 76  # bytes a token as Python lists hold it: an int (36), a small int (8), a float (32)
SLOWEST = 2  # times what a step's training should take: most of its times are extrapolated
PROMPT_TOKENS = 256  # of the mean prompt, where its limit allows as many


@dataclass(frozen=True)
class Workload:
    """What a step is reckoned with: tokens of the mean prompt and response, and of the longest sequence."""

    prompt: float
    response: float
    longest: int

    @property
    def mean(self) -> float:
        return self.prompt + self.response

    @property
    def held(self) -> float:
        """Tokens of the mean sequence while it is generated, on average."""
        return self.prompt + self.response / 2


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage. `training` names what is there at the peak of an update; `others`: the
    sums of the phases that a colocated server has its part in (weight_sync/memory.py), none without one. All include
    what is reserved."""

    stage: int
    state: StageState
    training: Mapping[str, float]
    others: Mapping[str, float]

    @property
    def peak(self) -> float:
        return max(_total(self.training), *self.others.values(), 0.0)


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
class Plan:
    config: Config
    spec: ModelSpec
    cluster: Cluster
    work: Workload
    micro_batches: int  # of an update, on each rank
    stages: list[StageMemory]
    servers: Servers | None
    times: Times
    host: Mapping[str, float]  # parts of the host memory of the fullest node, bytes

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.peak for stage in self.stages)

    @functools.cached_property
    def fault(self) -> str | None:
        """Why the run cannot work; None where nothing is wrong."""
        servers, most = self.servers, self.cluster.gpu.memory
        if (over := self.peak - most) > 0:
            optimizer = max(stage.state.optimizer for stage in self.stages)
            mend = f"; optimizer.cpu_offload keeps {optimizer / GIB:.1f} in host memory" if optimizer > over else ""
            fullest = max(self.stages, key=lambda stage: stage.peak)
            in_turn = shares_memory(self.config.rollout, gpus=True)  # the KV cache is there while a server generates
            generates_most = fullest.others.get("generate") == fullest.peak
            if generates_most if in_turn else any(total > most for total in fullest.others.values()):
                mend = "; lower rollout.memory_fraction"
            if self.config.model.max_length is None and self.work.longest > self.config.trainer.micro_batch_tokens:
                mend += f"; a sequence may have {self.work.longest:,} tokens: set model.max_length"
            return f"does not fit: {over / GIB:.1f} GiB too much on the fullest rank{mend}"
        if servers is None:
            return None
        if servers.peak > most:  # on a GPU of its own: with ranks beside it the line above says it
            return (
                f"does not fit: a server needs {servers.peak / GIB:.1f} GiB of a GPU's {most / GIB:.1f}, "
                f"{SERVER_WORKING / GIB:.1f} of them beside weights and KV cache; lower rollout.memory_fraction"
            )
        if servers.longest_sequences < 1:
            return (
                f"does not fit: a server's KV cache holds {servers.tokens:,.0f} tokens, a sequence may have "
                f"{self.work.longest}; raise rollout.tp or rollout.memory_fraction"
            )
        return None

    @property
    def assumed(self) -> list[str]:
        """A line if the rewards of a step decide how many rollouts it samples."""
        (least, most), budget = self.config.rollout_range, self.config.rollout_budget
        if (dynamic := self.config.algorithm.dynamic_sampling) is not None:
            return [
                f"algorithm.dynamic_sampling: a step may sample in up to {dynamic.rounds} further rounds; the plan is "
                "for none"
            ]
        if least == most:
            return []
        return [
            f"algorithm.sequential: a step samples {least} to {most} rollouts and trains on some of them; the numbers "
            f"depend on their rewards, and the plan is for {budget} that are sampled and trained on"
        ]

    @property
    def checkpoint(self) -> int:
        """Bytes."""
        of_one = formulas.checkpoint_bytes(self.spec, self.config.model.dtype, self.config.model.lora)
        return self.config.trained_models * of_one

    @property
    def stop_before(self) -> int:
        """Seconds that a job should be told before its time limit: from the last look for a stop, at the end of
        generation, to the end of the save after the step, in whole tens of minutes."""
        save = self.checkpoint / self.cluster.nodes / rate("disk")
        return math.ceil((SLOWEST * self.times.training + save) / 600) * 600


def workload(config: Config, spec: ModelSpec, response: int | None = None) -> Workload:
    """Raises InputError where prompt and response do not fit the model, or the mean response not its limit."""
    limit, most = max_prompt_length(config, spec), config.rollout.max_new_tokens
    if response is not None and response > most:
        raise ConfigError(f"--response-tokens: {response} is above rollout.max_new_tokens {most}")
    return Workload(min(PROMPT_TOKENS, limit), response or most / 2, longest_sequence(config, spec))


def make_plan(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> Plan:
    """The layout must fit model and cluster (`check_ranks`). Raises ConfigError where the servers do not."""
    config = config.with_servers(cluster.gpus, cluster.nodes)
    micro_batches = _micro_batches(config, cluster, work.mean)
    servers = _servers(config, spec, cluster, work)
    stages = [_stage(config, spec, cluster, work, stage, servers) for stage in range(config.parallel.pp)]
    states = [stage.state for stage in stages]
    logprobs, update = formulas.training_seconds(config, spec, cluster, work.mean, states, micro_batches)
    generate = weight_sync = 0.0
    if servers is not None:
        weight_sync = formulas.sync_seconds(config, spec, servers.weights)
        generate = _generation(config, spec, cluster, work, servers)
    times = Times(generate, logprobs, update, weight_sync, overlap=config.rollout.max_staleness > 0)
    host = host_memory(config, spec, cluster.gpus, cluster.gpus_per_node, work.mean)
    return Plan(config, spec, cluster, work, micro_batches, stages, servers, times, host)


def _micro_batches(config: Config, cluster: Cluster, length: float) -> int:
    """Of an update on each rank, if prompt and response have `length` tokens on average."""
    p, of_update = config.parallel, config.rollout_budget * length / config.algorithm.loss.mini_batches
    dp = cluster.gpus // p.model_ranks
    count = max(1, -(-int(of_update) // (dp * config.trainer.micro_batch_tokens)))
    return -(-count // p.pp) * p.pp if p.vpp > 1 else count


def _stage(
    config: Config, spec: ModelSpec, cluster: Cluster, work: Workload, stage: int, servers: Servers | None
) -> StageMemory:
    p, t, dtype = config.parallel, config.trainer, config.model.dtype
    lora, on_host = config.model.lora, config.optimizer.cpu_offload
    state = formulas.stage_state(spec, p, dtype, cluster.gpus, stage, lora, cpu_offload=on_host)
    # A longer sequence has a micro-batch to itself, and so has an episode with all its segments.
    tokens = max(t.micro_batch_tokens, work.longest, config.rollout.agent_tokens or 0)
    most = _micro_batches(config, cluster, work.longest)  # responses may grow: memory is for the longest
    layers, batches = formulas.in_flight(p, spec.num_layers, stage, most)
    saved = formulas.saved_activations(spec, p, dtype, t.recompute, tokens, layers, batches, lora)
    passing = formulas.backward_memory(spec, p, dtype, tokens)
    if stage == p.pp - 1:
        chunk, backend = config.kernels.chunk_tokens, config.kernels.backend
        passing = max(passing, formulas.head_memory(spec, p, dtype, tokens, chunk, backend, frozen=lora is not None))
    # Adam's temporaries, one float32 value for each of its elements where it is torch's, come after the backward.
    working = max(saved + passing, 0 if on_host else 4 * state.owned)
    training = {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": min(saved, working),
        "head, backward": working - min(saved, working),
        "reserved": RESERVED,
    }
    others: dict[str, float] = {}
    colocated = servers is not None and config.rollout.placement == "colocated"
    if config.of_critic is not None and not (colocated and shares_memory(config.rollout, gpus=True)):
        training["critic"] = state.total  # else it and the policy are offloaded in turn
    if colocated:
        training["server"], others = _shared(config, state, servers)
    return StageMemory(stage, state, training, others)


def _shared(config: Config, state: StageState, servers: Servers) -> tuple[float, dict[str, float]]:
    """Bytes of a colocated server during an update, and what is on the GPU in the other phases."""
    held, sync = servers.peak, config.rollout.sync
    buckets = (IPC_BUCKETS if sync.transport in ("auto", "ipc") else SYNC_BUCKETS) * sync.bucket_bytes
    both = config.trained_models * state.total
    always = both + held
    phases = {"generate": always, "weight sync": always + buckets, "save": always}
    if offloads := shares_memory(config.rollout, gpus=True):
        beside = servers.weights + SERVER_REMAINS
        phases = {"generate": held, "weight sync": state.parameters + beside + buckets, "save": both + beside}
    return SERVER_REMAINS if offloads else held, {name: size + RESERVED for name, size in phases.items()}


def _servers(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> Servers | None:
    """None where no server of ours runs on a GPU that is known."""
    rollout, gpu, dtype = config.rollout, cluster.gpu, config.model.dtype
    if rollout.engine != "sglang" or rollout.placement == "external":
        return None
    if rollout.quantization is not None and not gpu.fp8_sync:
        raise ConfigError(
            f"rollout.quantization: SGLang takes no {rollout.quantization} weights in a sync on {gpu.name}; "
            "leave it out"
        )
    if rollout.proof.checksums:
        check_server_parallel(spec, rollout.tp, "cuda")
    colocated = rollout.placement == "colocated"
    if colocated and rollout.servers % cluster.nodes:
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers can't be spread evenly over {cluster.nodes} nodes; "
            f"give a multiple of {cluster.nodes}"
        )
    here = rollout.servers // cluster.nodes if colocated else 1
    # Servers on GPUs of their own may have more than the ranks of a part of a node.
    if here * rollout.tp > cluster.gpus_per_node and (colocated or cluster.nodes > 1):
        on = f"the {cluster.gpus_per_node} GPUs of a node"
        raise ConfigError(f"rollout.servers: {here} x rollout.tp {rollout.tp} do not fit on {on}")
    weights = formulas.server_bytes(spec, rollout.tp, dtype, rollout.quantization)
    pool = max(0.0, rollout.memory_fraction * gpu.memory - weights)
    a_token = formulas.kv_bytes_a_token(spec, rollout.tp, dtype)
    return Servers(
        count=rollout.servers,
        tp=rollout.tp,
        weights=weights,
        pool=pool,
        kv_bytes_a_token=a_token,
        tokens=pool / a_token,
        longest_sequences=pool / a_token / work.longest,
        running=min(config.rollout_budget / rollout.servers, rollout.concurrency, pool / a_token / work.held),
    )


def _generation(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload, servers: Servers) -> float:
    """Seconds: all tokens of a server's share with as many sequences as run at once, or its longest response alone."""
    prefill = formulas.forward_flops(spec, [(config.data.batch_prompts / servers.count, work.prompt)])
    prefill /= servers.tp * formulas.server_flops(config, cluster.gpu)
    running = max(1.0, servers.running)
    steps = config.rollout_budget / servers.count * work.response / running
    together = steps * formulas.decode_seconds(config, spec, cluster.gpu, running, work.held)
    alone = config.rollout.max_new_tokens * formulas.decode_seconds(config, spec, cluster.gpu, 1, work.longest / 2)
    return prefill + max(together, alone)


def host_memory(
    config: Config, spec: ModelSpec, ranks: int, ranks_per_node: int, tokens: float, *, cuda: bool = True
) -> dict[str, float]:
    """Parts of the peak of host memory, bytes, of the node with the highest one; its processes are an allowance, the
    rest is arithmetic (docs/checkpoints.md). The `ranks` ranks are numbered in the order tp, cp, dp, pp, with tp
    fastest (policy/layout.py). A rollout has `tokens` tokens on average. The layout must fit the ranks."""
    rollout, p, dtype = config.rollout, config.parallel, config.model.dtype
    options = {"lora": config.model.lora, "cpu_offload": config.optimizer.cpu_offload}
    states = [formulas.stage_state(spec, p, dtype, ranks, stage, **options) for stage in range(p.pp)]
    serves = rollout.engine == "sglang" and rollout.placement == "colocated"
    offloads = shares_memory(rollout, gpus=cuda)
    saved = formulas.WIDTH[dtype] + 12 if config.checkpoint.async_save else 0  # else a tensor at a time
    routes = spec.replayed(rollout)
    token = ROLLOUT_TOKEN + (0 if routes is None else routes.token_bytes)
    frozen, trained, nodes = len(config.copied_models), config.trained_models, []
    for first in range(0, ranks, ranks_per_node):
        here = [states[rank * p.pp // ranks] for rank in range(first, min(first + ranks_per_node, ranks))]
        servers = -(-rollout.servers * len(here) // ranks) if serves else 0
        parts = {"processes": (len(here) + servers * rollout.tp) * PROCESS_BYTES}
        parts["the optimizer"] = trained * sum(s.host for s in here)
        if not cuda:
            parts["weights, gradients and optimizer"] = trained * sum(s.total for s in here)
            parts["the servers' weights"] = servers * formulas.weight_bytes(spec, dtype)
        waiting = sum(s.pinned if cuda else s.parameters + s.optimizer for s in here)
        training = {
            "saving a checkpoint": trained * saved * sum(s.owned for s in here),
            "what waits while servers generate": offloads * trained * waiting,
            "the reference policy": frozen * sum(s.reference if cuda else s.parameters for s in here),
            # Of this step twice, and of those that are sampled ahead.
            "rollouts": (first == 0) * (2 + rollout.max_staleness) * config.rollout_budget * tokens * token,
        }
        loading = {"loading a checkpoint": 12 * sum(sum(s.trained) for s in here)}
        parts |= max(training, loading, key=_total)  # the two never coincide
        nodes.append({name: size for name, size in parts.items() if size})
    return max(nodes, key=_total)


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())
