"""`dynamo-megatron plan`: a config's plan, or with --search the layouts of its model by the time of a step, as text."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.start_checks import check_ranks
from dynamo_megatron.models import FAMILIES, ModelSpec, load_model_config
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.hardware import GIB, GPUS, Cluster
from dynamo_megatron.planning.plan import SERVER_WORKING, Plan, Workload, make_plan, workload
from dynamo_megatron.planning.rates import MEASURED_ON
from dynamo_megatron.rollout.retention import stored_step

# Keys that training needs and a plan does not.
UNNEEDED = {"data": {"source": "none"}, "output_dir": "none"}
SHOWN = 20  # layouts of a search
CHUNKS = (1, 2, 4)  # vpp: more chunks gain little and cost memory
# Not `selective`: it saves no memory where attention does not store its scores (formulas.saved_activations).
RECOMPUTE = ("none", "full")
MEASURED = (
    f"measured on one {MEASURED_ON.name} at 1.5 billion parameters in bfloat16; for other sizes and GPUs, several of "
    "them, experts and servers of more than one rank extrapolated; weight sync by ipc on an H200"
)


def model_spec(config: Config) -> tuple[ModelSpec, str]:
    """(the model's shape, a text that says where it comes from). Raises ConfigError."""
    path, family = config.model.path, config.model.family
    if config.model.source == "bridge":
        raise ConfigError("model.source: bridge: memory and time of its models are not planned; measure a short run")
    shape = {name.lower(): model["config"] for name, model in PUBLISHED.items()}.get(Path(path).name.lower())
    if Path(path).is_dir() or shape is None:
        try:
            return load_model_config(path, family), f"{path}/config.json"
        except ValueError as error:
            known = "" if Path(path).is_dir() else f"; shapes known without a folder: {', '.join(PUBLISHED)}"
            raise ConfigError(f"{error}{known}") from None
    return FAMILIES[shape["model_type"]].read(shape), f"as published; there is no folder {path}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, the first row their titles; all but the first column to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def describe(plan: Plan, origin: str) -> str:
    """The whole report; `origin` says where the model's shape is from."""
    spec, c, work = plan.spec, plan.cluster, plan.work
    total, active = formulas.model_elements(spec), formulas.active_elements(spec)
    mixture = f", {active / 1e9:.2f} billion of them for a token" if active != total else ""
    lines = [
        f"model: {spec.family}, {spec.num_layers} layers, {total:,} parameters{mixture} ({origin})",
        f"cluster: {c.gpus} x {c.gpu.name} in {c.nodes} nodes, {_gib(c.gpu.memory)} GiB each",
        f"a step: {plan.config.rollout_budget} rollouts of {work.prompt:g} + {work.response:g} tokens on average; "
        f"{plan.micro_batches} micro-batches an update on each rank",
    ]
    lines += [*plan.assumed, "", *_memory(plan), "", *_servers(plan), *_host_and_disk(plan), "", *_times(plan)]
    verdict = plan.fault or f"fits: {_gib(c.gpu.memory - plan.peak)} GiB left on the fullest rank"
    return "\n".join([*lines, "", verdict])


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def _memory(plan: Plan) -> list[str]:
    per_stage = plan.cluster.gpus // plan.config.parallel.pp
    rows = [["stage (ranks)", *plan.stages[0].training, "update", *plan.stages[0].others, "left"]]
    for stage in plan.stages:
        ranks = f"{stage.stage * per_stage}-{(stage.stage + 1) * per_stage - 1}"
        cells = *stage.training.values(), sum(stage.training.values()), *stage.others.values()
        rows.append([f"{stage.stage} ({ranks})", *map(_gib, (*cells, plan.cluster.gpu.memory - stage.peak))])
    return ["memory of a rank at the peak of an update, and all of it in the other phases, GiB:", *table(rows)]


def _servers(plan: Plan) -> list[str]:
    s, rollout = plan.servers, plan.config.rollout
    if s is None:
        return ["servers: none of this run's own"]
    where = "on the training's GPUs" if rollout.placement == "colocated" else f"on {s.gpus} GPUs more"
    return [
        f"servers: {s.count} of {s.tp} GPUs {where}; on each GPU {_gib(s.weights)} GiB "
        f"{rollout.quantization or plan.config.model.dtype} weights, {_gib(s.pool)} GiB KV cache "
        f"({s.kv_bytes_a_token / 1024:.1f} KiB a token), {_gib(SERVER_WORKING)} for graphs and activations",
        f"  a server holds {s.tokens:,.0f} tokens: {s.longest_sequences:,.1f} sequences of {plan.work.longest}; "
        f"{s.running:,.0f} run at once",
    ]


def _host_and_disk(plan: Plan) -> list[str]:
    config, nodes = plan.config, plan.cluster.nodes
    step = stored_step(config.rollout_budget, plan.work.response, plan.spec.replayed(config.rollout), plan.work.prompt)
    kept = config.trainer.steps
    if config.rollout.keep_last is not None:  # none that a resume would need goes
        kept = min(kept, max(config.rollout.keep_last, config.checkpoint.every or kept) + 1)
    parts = ", ".join(f"{what} {_gib(size)}" for what, size in plan.host.items())
    return [
        f"host memory of the fullest node: {_gib(sum(plan.host.values()))} GiB at the peak ({parts})",
        f"checkpoint: {_gib(plan.checkpoint)} GiB each, {_gib(plan.checkpoint / nodes)} from each node, "
        f"{config.checkpoint.keep_last} kept; a copy of the weights "
        f"{_gib(formulas.weight_bytes(plan.spec, config.model.dtype))} GiB",
        f"rollouts on disk: {_gib(step)} GiB a step, {_gib(step * kept)} GiB in all",
    ]


def _times(plan: Plan) -> list[str]:
    t = plan.times
    return [
        f"times of a step, seconds: {MEASURED}",
        f"  generate {t.generate:.1f}, log-probs {t.logprobs:.1f}, update {t.update:.1f}, weights {t.weight_sync:.2f}; "
        f"together {t.step:.1f}{', generated while the ranks train' if t.overlap else ''}",
        f"a stop waits for the end of the step and for the save: give `launch slurm` --stop-before {plan.stop_before}",
    ]


def ranked(config: Config, spec: ModelSpec, cluster: Cluster, work: Workload) -> list[Plan]:
    """A plan for every layout that model, method and cluster allow, with the best server size for it. Layouts that fit
    come first, by the time of a step in classes of 10 %, and in each class the simpler layouts first. The others
    follow, by the memory that they need.

    Colocated servers are spread over all GPUs. With placement split, every division of the cluster between ranks and
    servers is tried: whole nodes, or any division of a single node."""
    placement, divided = config.rollout.placement, [(cluster, None)]
    if placement == "split":
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
    contexts = [1] if whole else sizes
    for tp, cp, pp, vpp, ep in itertools.product(sizes, contexts, _powers(cluster.gpus), CHUNKS, experts):
        if vpp > 1 and pp == 1:
            continue
        last = next(iter(spec.last_stages(pp, vpp)), None) if spec.num_layers % pp else None
        parallel = ParallelConfig(tp=tp, pp=pp, vpp=vpp, last_stage_layers=last, cp=cp, ep=ep)
        try:
            check_ranks(config.model_copy(update={"parallel": parallel}), spec, cluster.gpus)
        except InputError:
            continue
        yield parallel


def search_table(plans: list[Plan], spec: ModelSpec, cluster: Cluster, origin: str) -> str:
    """The best SHOWN plans as a table, and the config words for the first."""
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
        f"seconds: {MEASURED}",
        *(plans[0].assumed if plans else []),
        *table(rows),
    ]
    if fitting:
        best = plans[0].config
        words = [f"parallel.{key}={json.dumps(value)}" for key, value in best.parallel.model_dump().items()]
        words += [f"rollout.tp={best.rollout.tp}", f"rollout.servers={best.rollout.servers}"]
        words.append(f"trainer.recompute={best.trainer.recompute}")
        lines.append(f"the first: {' '.join(words)}")
    return "\n".join(lines)


def plan(options: argparse.Namespace) -> int:
    """Prints the plan, or with --search the ranked layouts. Returns 0 where the run (or one of the layouts) works, else
    1. Raises ConfigError."""
    config, _ = compose(options.files, options.keys, UNNEEDED)
    gpus, a_node = options.gpus, options.gpus_per_node
    if gpus > a_node and gpus % a_node:
        raise ConfigError(f"--gpus: {gpus} do not fill nodes of {a_node} (--gpus-per-node)")
    cluster, (spec, origin) = Cluster(GPUS[options.gpu], gpus, min(gpus, a_node)), model_spec(config)
    work = workload(config, spec, options.response_tokens)
    if options.search:
        plans = ranked(config, spec, cluster, work)
        print(search_table(plans, spec, cluster, origin))
    else:
        check_ranks(config, spec, gpus)
        plans = [make_plan(config, spec, cluster, work)]
        print(describe(plans[0], origin))
    return 0 if plans and plans[0].fault is None else 1
