"""Ranks the layouts of a model on a cluster by the lower bound on the time of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dynamo_megatron.config import Config, ParallelConfig, shipped
from dynamo_megatron.config.files import ConfigError, read_yaml
from dynamo_megatron.jobs.layout_checks import check_ranks
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.planning.hardware import GIB, Cluster
from dynamo_megatron.planning.plan import Plan, Workload, make_plan
from dynamo_megatron.planning.report import cautions, table

SHOWN = 20
CHUNKS = (1, 2, 4)  # vpp: more chunks gain little and cost memory
# Not `selective`: it saves no memory where attention does not store its scores (formulas.saved_activations).
RECOMPUTE = ("none", "full")


def ranked(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> list[Plan]:
    """A plan for every layout that model, method and cluster allow, with the best server size for it. Layouts that fit
    come first, by the time of a step in classes of 10 %, and in each class the simpler layouts first. The others
    follow, by the memory that they need.

    Colocated servers are spread over all GPUs. With `rollout.max_staleness` and placement split, every division of the
    cluster between ranks and servers is tried."""
    plans = []
    divided = _divided(cluster) if _divides(config) else [(cluster, None)]
    for ranks, serving in divided:
        plans += _of_ranks(config, spec, ranks, serving, work)
    return _in_order(plans)


def _divides(config: Config) -> bool:
    return config.rollout.max_staleness > 0 and config.rollout.placement == "split"


def _divided(cluster: Cluster) -> Iterator[tuple[Cluster, int]]:
    """Yields (the ranks' part of the cluster, the servers' GPUs): whole nodes, or any division of a single node."""
    unit = cluster.gpus_per_node if cluster.nodes > 1 else 1
    for gpus in range(unit, cluster.gpus, unit):
        yield replace(cluster, gpus=gpus), cluster.gpus - gpus


def _of_ranks(config: Config, spec: ModelSpec, cluster: Cluster, serving: int | None, work: Workload) -> list[Plan]:
    """The plans for ranks on `cluster`, one per layout. `serving`: number of the servers' own GPUs; None: as
    configured."""
    plans = []
    for parallel, recompute in itertools.product(_layouts(config, spec, cluster), RECOMPUTE):
        options = []
        for server_tp in _powers(min(cluster.gpus_per_node, serving or cluster.gpus_per_node)):
            changes = {"tp": server_tp}
            if config.rollout.placement == "colocated":
                changes["servers"] = cluster.gpus // server_tp
            elif serving is not None:
                changes["servers"] = serving // server_tp
            candidate = config.model_copy(
                update={
                    "parallel": parallel,
                    "rollout": config.rollout.model_copy(update=changes),
                    "trainer": config.trainer.model_copy(update={"recompute": recompute}),
                }
            )
            try:
                options.append(make_plan(candidate, spec, cluster, work))
            except ConfigError:
                continue  # the model's heads cannot be divided among server_tp ranks
        if options:
            plans.append(_in_order(options)[0])
    return plans


def _in_order(plans: list[Plan]) -> list[Plan]:
    shortest = min((plan.times.step for plan in plans if plan.fits), default=1.0)

    def key(plan: Plan) -> tuple[float, ...]:
        if not plan.fits:
            return (1, plan.peak)
        p, step = plan.config.parallel, plan.times.step
        slower = int(math.log(step / shortest, 1.1))  # step is at least shortest * 1.1**slower
        return (0, slower, p.cp, p.vpp, p.pp, p.tp, plan.config.rollout.tp, step)

    return sorted(plans, key=key)


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


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
        except ConfigError:
            continue
        yield parallel


def _shipped_layout(plans: list[Plan], cluster: Cluster) -> Iterator[str]:
    """A line that says where the layout of `configs/hardware` for this model is, if there is one, and why it is not
    the first."""
    kind, model = cluster.gpu.name.partition("-")[0], Path(plans[0].config.model.path).name.lower()
    name = f"hardware/{kind}x{cluster.gpus}/{model}"
    if (file := shipped.path(name)) is None:
        return
    sections = read_yaml(file, name)
    wanted = ParallelConfig(**sections.get("parallel", {})), sections["trainer"]["recompute"]
    for number, plan in enumerate(plans, 1):
        if (plan.config.parallel, plan.config.trainer.recompute) == wanted and number > 1:
            yield (
                f"the shipped layout, {name}, is row {number} with {plan.times.step:.1f} s: it was chosen by hand, to "
                "leave a tenth of each GPU's memory free and with few pipeline stages; the rows are in order of the "
                "step's floor in classes of 10 %, then of cp, vpp, pp and tp"
            )


def search_table(plans: list[Plan], spec: ModelSpec, cluster: Cluster, origin: str) -> str:
    """A text with the best SHOWN plans, and with the config words for the first."""
    fitting = sum(plan.fits for plan in plans)
    divides = bool(plans) and _divides(plans[0].config)
    titles = ["rank", "tp", "pp", "vpp", "cp", "ep", "dp", "recompute", "server tp", "GiB", "step s", "train s", "fits"]
    rows = [[*titles[:1], "ranks", "server GPUs", *titles[1:]] if divides else titles]
    for number, plan in enumerate(plans[:SHOWN], 1):
        p = plan.config.parallel
        sizes = [p.tp, p.pp, p.vpp, p.cp, p.ep, plan.dp]
        rows.append(
            [
                str(number),
                *([str(plan.cluster.gpus), str(plan.servers.gpus)] if divides else []),
                *map(str, sizes),
                plan.config.trainer.recompute,
                str(plan.config.rollout.tp),
                f"{plan.peak / GIB:.1f}",
                f"{plan.times.step:.1f}",
                f"{plan.times.training:.1f}",
                "yes" if plan.fits else f"{(plan.peak - cluster.gpu.memory) / GIB:.1f} too much",
            ]
        )
    lines = [
        f"{spec.family} ({origin}) on {cluster.gpus} x {cluster.gpu.name}: {len(plans)} layouts, {fitting} fit",
        "GiB: of the fullest rank; step s, train s: floors, of a whole step and without generation",
        *table(rows),
    ]
    if fitting:
        best, p = plans[0].config, plans[0].config.parallel
        words = [f"parallel.{key}={str(value).lower()}" for key, value in p.model_dump().items()]
        words += [f"rollout.tp={best.rollout.tp}", f"rollout.servers={best.rollout.servers}"]
        lines += cautions(plans[0])
        if divides:
            t, ranks = plans[0].times, plans[0].cluster.gpus
            who, whom = ("ranks", "servers") if t.waits > 0 else ("servers", "ranks")
            lines.append(f"with {ranks} ranks the {who} wait {abs(t.waits):.1f} s of each step for the {whom}")
        lines += _shipped_layout(plans, cluster)
        lines.append("the first: " + " ".join([*words, f"trainer.recompute={best.trainer.recompute}"]))
    return "\n".join(lines)
