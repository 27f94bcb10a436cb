"""Ranks the layouts of a model on a cluster by the time of a step."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import replace

from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.start_checks import check_ranks
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning.hardware import GIB, Cluster
from dynamo_megatron.planning.plan import Plan, Workload, make_plan
from dynamo_megatron.planning.report import cautions, measured_on, table

SHOWN = 20
CHUNKS = (1, 2, 4)  # vpp: more chunks gain little and cost memory
# Not `selective`: it saves no memory where attention does not store its scores (formulas.saved_activations).
RECOMPUTE = ("none", "full")


def ranked(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> list[Plan]:
    """A plan for every layout that model, method and cluster allow, with the best server size for it. Layouts that fit
    come first, by the time of a step in classes of 10 %, and in each class the simpler layouts first. The others
    follow, by the memory that they need.

    Colocated servers are spread over all GPUs. With `rollout.max_staleness` and placement split, every division of the
    cluster between ranks and servers is tried: whole nodes, or any division of a single node."""
    placement, divided = config.rollout.placement, [(cluster, None)]
    if config.rollout.max_staleness > 0 and placement == "split":
        unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
        divided = [(replace(cluster, gpus=own), cluster.gpus - own) for own in range(unit, cluster.gpus, unit)]
    plans = []
    for ranks, serving in divided:
        gpus = ranks.gpus if placement == "colocated" else serving
        sizes = _powers(min(ranks.gpus_per_node, serving or ranks.gpus_per_node))
        for parallel, recompute, tp in itertools.product(_layouts(config, spec, ranks), RECOMPUTE, sizes):
            servers = {"tp": tp} if gpus is None else {"tp": tp, "servers": gpus // tp}
            updates = {
                "parallel": parallel,
                "rollout": config.rollout.model_copy(update=servers),
                "trainer": config.trainer.model_copy(update={"recompute": recompute}),
            }
            with contextlib.suppress(InputError):  # the model's heads cannot be divided among tp ranks
                plans.append(make_plan(config.model_copy(update=updates), spec, ranks, work))
    shortest = min((plan.times.step for plan in plans if plan.fault is None), default=1.0)

    def place(plan: Plan) -> tuple[float, ...]:
        if plan.fault is not None:
            return (1, plan.peak)
        p, step = plan.config.parallel, plan.times.step
        slower = int(math.log(step / shortest, 1.1))  # step is at least shortest * 1.1**slower
        return (0, slower, p.cp, p.vpp, p.pp, p.tp, plan.config.rollout.tp, step)

    best: dict[Hashable, Plan] = {}
    for plan in sorted(plans, key=place):
        best.setdefault((plan.cluster.gpus, plan.config.parallel, plan.config.trainer.recompute), plan)
    return list(best.values())


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def _layouts(config: Config, spec: ModelSpec, cluster: Cluster) -> Iterator[ParallelConfig]:
    """Yields the layouts that model, method and cluster allow. Tensor parallelism stays within a node and always has
    sequence parallelism."""
    modulation = config.algorithm.modulation
    whole = modulation and (modulation.scope == "micro_batch" or modulation.expectation == "sequence_mean")
    experts = [e for e in _powers(cluster.gpus) if spec.num_experts and spec.num_experts % e == 0] or [1]
    sizes = _powers(cluster.gpus_per_node)
    for tp, cp, pp, vpp, ep in itertools.product(
        sizes, [1] if whole else sizes, _powers(cluster.gpus), CHUNKS, experts
    ):
        if vpp > 1 and pp == 1:
            continue
        parallel = ParallelConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, sequence_parallel=tp > 1)
        try:
            check_ranks(config.model_copy(update={"parallel": parallel}), spec, cluster.gpus)
        except InputError:
            continue
        yield parallel


def search_table(plans: list[Plan], spec: ModelSpec, cluster: Cluster, origin: str) -> str:
    """A text with the best SHOWN plans, and with the config words for the first."""
    fitting = sum(plan.fault is None for plan in plans)
    sizes = ["tp", "pp", "vpp", "cp", "ep"]
    rows = [["rank", "ranks", *sizes, "dp", "recompute", "servers", "of tp", "GiB", "step s", "train s", "fits"]]
    for number, plan in enumerate(plans[:SHOWN], 1):
        p, gpus, rollout, times = plan.config.parallel, plan.cluster.gpus, plan.config.rollout, plan.times
        cells = [number, gpus, *(getattr(p, size) for size in sizes), gpus // p.model_ranks]
        cells += [plan.config.trainer.recompute, rollout.servers, rollout.tp, f"{plan.peak / GIB:.1f}"]
        rows.append([*map(str, cells), f"{times.step:.1f}", f"{times.training:.1f}", "no" if plan.fault else "yes"])
    lines = [
        f"{spec.family} ({origin}) on {cluster.gpus} x {cluster.gpu.name}: {len(plans)} layouts, {fitting} fit",
        "GiB: of the fullest rank; step s, train s: of a whole step and without generation",
        *(f"seconds: at the rates of {measured_on(plan)}" for plan in plans[:1]),
        *table(rows),
    ]
    if fitting:
        best = plans[0].config
        words = [f"parallel.{key}={str(value).lower()}" for key, value in best.parallel.model_dump().items()]
        words += [f"rollout.tp={best.rollout.tp}", f"rollout.servers={best.rollout.servers}"]
        words.append(f"trainer.recompute={best.trainer.recompute}")
        lines += [*cautions(plans[0]), f"the first: {' '.join(words)}"]
    return "\n".join(lines)
