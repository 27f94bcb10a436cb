"""The plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.hardware import GIB
from dynamo_megatron.planning.plan import SERVER_WORKING, Plan
from dynamo_megatron.planning.rates import MEASURED_ON, MEASURED_PARAMETERS
from dynamo_megatron.rollout.retention import stored_step


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
    lines += ["", *_memory(plan), "", *_servers(plan), *_host_and_disk(plan), "", *_times(plan)]
    return "\n".join([*lines, *cautions(plan), "", verdict(plan)])


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
    routes = plan.spec.replayed(config.rollout)
    step = stored_step(config.rollout_budget, plan.work.response, routes, plan.work.prompt)
    parts = ", ".join(f"{what} {_gib(size)}" for what, size in plan.host.items())
    return [
        f"host memory of the fullest node: {_gib(sum(plan.host.values()))} GiB at the peak ({parts})",
        f"checkpoint: {_gib(plan.checkpoint)} GiB each, {_gib(plan.checkpoint / nodes)} from each node, "
        f"{config.checkpoint.keep_last} kept; a copy of the weights "
        f"{_gib(formulas.weight_bytes(plan.spec, config.model.dtype))} GiB",
        f"rollouts on disk: {_gib(step)} GiB a step, {_gib(step * config.trainer.steps)} GiB in all",
    ]


def _times(plan: Plan) -> list[str]:
    t = plan.times
    return [
        f"times of a step, seconds, at the rates of {measured_on(plan)}",
        f"  generate {t.generate:.1f}, log-probs {t.logprobs:.1f}, update {t.update:.1f}, weights {t.weight_sync:.2f}; "
        f"together {t.step:.1f}{', generated while the ranks train' if t.overlap else ''}",
        f"a stop waits for the end of the step and for the save: `launch slurm --gpu {plan.cluster.gpu.name}` sets "
        f"--stop-before to {plan.stop_before} at least",
    ]


def measured_on(plan: Plan) -> str:
    """Where the times' rates were measured, and what of this plan goes beyond that."""
    config, gpu, elements = plan.config, plan.cluster.gpu, formulas.model_elements(plan.spec)
    beyond = {
        f"{elements / 1e9:.1f} billion": not 0.5 < elements / MEASURED_PARAMETERS < 2,
        "experts": plan.spec.num_experts > 0,
        config.model.dtype: config.model.dtype != "bfloat16",
        f"{gpu.name} by its stated rates": gpu != MEASURED_ON,
        "an optimizer in host memory": config.optimizer.cpu_offload,
        "several GPUs, links by their stated rates": plan.cluster.gpus > 1,
    }
    if plan.servers is not None:
        beyond |= {
            f"servers of tp {plan.servers.tp}": plan.servers.tp > 1,
            f"{config.rollout.quantization} servers": config.rollout.quantization is not None,
            "weight sync through CUDA IPC by an H200's": config.rollout.sync.transport != "disk" and gpu == MEASURED_ON,
        }
    extrapolated = ", ".join(name for name, applies in beyond.items() if applies)
    measured = f"one {MEASURED_ON.name} and {MEASURED_PARAMETERS / 1e9:.1f} billion parameters"
    return measured + (f" (extrapolated: {extrapolated})" if extrapolated else "")


def cautions(plan: Plan) -> list[str]:
    """What this layout may meet."""
    rollout, servers, gpus = plan.config.rollout, plan.servers, plan.cluster.gpus
    if servers is None or rollout.placement != "colocated" or servers.gpus == gpus:
        return []
    return [
        f"{gpus - servers.gpus} of {gpus} GPUs are idle while servers generate: rollout.servers {rollout.servers} x "
        f"rollout.tp {rollout.tp}; leave rollout.servers out, or raise it"
    ]


def verdict(plan: Plan) -> str:
    return plan.fault or f"fits: {_gib(plan.cluster.gpu.memory - plan.peak)} GiB left on the fullest rank"
