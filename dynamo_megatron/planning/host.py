"""Estimates the host memory of the node that needs most: the parts of it, and the peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_megatron.config import Config
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.hardware import GIB

PROCESS_BYTES = 2 << 30  # host memory of torch, Megatron and the CUDA context, per rank or rank of a server


@dataclass(frozen=True)
class Host:
    """Bytes of host memory on one node. `state` and `servers` are 0 where there are GPUs, which then hold them."""

    processes: float
    state: float  # parameters, gradients, optimizer
    servers: float  # the servers' weights
    load: float
    save: float
    rollouts: float
    reference: float
    offloaded: float  # copies of the training state while servers generate; the memory is kept for the next time

    @property
    def parts(self) -> dict[str, float]:
        """name -> bytes of the parts that are not 0 and whose sum is the peak. Loading a checkpoint and the parts of a
        step never coincide, so only the larger of the two counts."""
        held = {
            "processes": self.processes,
            "weights, gradients and optimizer": self.state,
            "the servers' weights": self.servers,
        }
        training = {
            "saving a checkpoint": self.save,
            "what waits while servers generate": self.offloaded,
            "the reference policy": self.reference,
            "a step's rollouts": self.rollouts,
        }
        at_start = {"loading a checkpoint": self.load}
        peak = training if sum(training.values()) > self.load else at_start
        return {what: size for what, size in {**held, **peak}.items() if size}

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    @property
    def asked(self) -> str:
        """What a job asks sbatch for (--mem): the peak and a quarter more, since parts of it are estimates."""
        return f"{math.ceil(1.25 * self.peak / GIB)}G"


def shares_memory(config: Config) -> bool:
    """Returns True where servers and ranks on the same GPUs release their memory for each other (`rollout.offload`)."""
    return config.rollout.placement == "colocated" and config.rollout.offload is not False


def pinned(size: float) -> int:
    """Bytes that torch allocates for `size` bytes of pinned memory: the next power of two (its
    CachingHostAllocator)."""
    return 1 << (math.ceil(size) - 1).bit_length()


def pinned_copies(chunks: Sequence[formulas.Chunk], dtype: str, dp_cp: int, expert_dp: int) -> float:
    """Bytes of pinned memory per rank, on average, for the copies of policy/offload.py: the parameters in one buffer
    for each chunk and kind, and the optimizer's state tensor by tensor. A parameter that is larger than a rank's share
    is divided into pieces."""
    copies, total = 3 if dtype == "bfloat16" else 2, 0.0
    for chunk in chunks:
        kinds = (chunk.dense, chunk.shared_embedding, dp_cp), (chunk.experts, 0, expert_dp)
        for parameters, shared, ranks in kinds:
            if parameters:
                elements = formulas.buffer_elements(parameters, shared, ranks)
                cut = [(n, math.ceil(n * ranks / elements)) for n in parameters]
                state = sum(pieces * pinned(4 * n / pieces) for n, pieces in cut)
                total += pinned(elements * formulas.WIDTH[dtype]) + copies * state / ranks
    return total


def host_memory(
    config: Config, spec: ModelSpec, ranks: int, ranks_per_node: int, tokens: float, *, cuda: bool = True
) -> Host:
    """The host memory of the node with the highest peak. The `ranks` ranks are numbered in the order tp, cp, dp, pp,
    with tp fastest (policy/layout.py). A rollout has `tokens` tokens on average. The layout must fit the ranks."""
    p, dtype = config.parallel, config.model.dtype
    stages = [formulas.stage_state(spec, p, dtype, ranks, stage) for stage in range(p.pp)]
    copied = [float(stage.static.parameters + stage.static.optimizer) for stage in stages]
    references = [float(stage.static.parameters) for stage in stages]
    if cuda:
        dp_cp, expert_dp = max(1, ranks // (p.tp * p.pp)), max(1, ranks // (p.pp * p.ep))
        chunks = [formulas.stage_parameters(spec, p, stage) for stage in range(p.pp)]
        copied = [pinned_copies(own, dtype, dp_cp, expert_dp) for own in chunks]
        width = formulas.WIDTH[dtype]
        references = [float(sum(pinned(width * n) for c in own for n in (*c.dense, *c.experts))) for own in chunks]
    turns = shares_memory(config) and (cuda or config.rollout.offload is True)
    per_stage = ranks // p.pp
    hosts = []
    for first in range(0, ranks, ranks_per_node):
        state = load = save = reference = offloaded = 0
        here = range(first, min(first + ranks_per_node, ranks))
        for rank in here:
            stage = stages[rank // per_stage]
            static = stage.static
            save += formulas.save_staging(static.optimizer_elements, dtype) if config.checkpoint.async_save else 0
            load += formulas.load_staging(stage.dense + stage.experts)
            reference += references[rank // per_stage] * len(set(config.frozen_models.values()))
            offloaded += copied[rank // per_stage] if turns else 0
            state += 0 if cuda else static.total
        servers = -(-config.rollout.servers * len(here) // ranks) if _serves_here(config) else 0
        hosts.append(
            Host(
                processes=(len(here) + servers * config.rollout.tp) * PROCESS_BYTES,
                state=state,
                servers=0 if cuda else servers * formulas.weight_bytes(spec, dtype),
                load=load,
                save=save,
                rollouts=2 * config.rollout_budget * tokens * formulas.ROLLOUT_TOKEN if first == 0 else 0,
                reference=reference,
                offloaded=offloaded,
            )
        )
    return max(hosts, key=lambda host: host.peak)


def _serves_here(config: Config) -> bool:
    return config.rollout.engine == "sglang" and config.rollout.placement == "colocated"
