"""The plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.config import Config
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.hardware import GIB
from dynamo_megatron.planning.plan import RESERVED, SERVER_WORKING, SLOWEST, Plan, StageMemory
from dynamo_megatron.rollout.retention import SHARE, stored_step

STOP_BEFORE = 1800  # seconds, the default of `launch slurm --stop-before`

SLOW_SERVER = 3  # times the floor of a response: what a server may take without a fault


def layout(config: Config, dp: int) -> str:
    """Such as "tp 4 x pp 2 x dp 2, sequence-parallel, recompute full"."""
    p = config.parallel
    text = " x ".join(f"{name} {n}" for name, n in (("tp", p.tp), ("pp", p.pp), ("cp", p.cp), ("dp", dp)) if n > 1)
    extra = [f"{name} {n}" for name, n in (("vpp", p.vpp), ("ep", p.ep)) if n > 1]
    extra += ["sequence-parallel"] if p.sequence_parallel else []
    extra += [f"recompute {config.trainer.recompute}"]
    return ", ".join([text or "one rank", *extra])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, the first row their titles; all but the first column to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]


def describe(plan: Plan, origin: str) -> str:
    """The whole report; `origin` says where the model's shape is from."""
    return "\n".join([*_head(plan, origin), "", *_memory(plan), "", *_servers(plan), *_rest(plan), "", verdict(plan)])


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"


def _head(plan: Plan, origin: str) -> list[str]:
    spec, c, work, config = plan.spec, plan.cluster, plan.work, plan.config
    active = formulas.active_elements(spec)
    total = formulas.model_elements(spec)
    mixture = f", {active / 1e9:.2f} billion of them for a token" if active != total else ""
    return [
        f"model: {spec.family}, {spec.num_layers} layers, {total:,} parameters{mixture} ({origin})",
        f"cluster: {c.gpus} x {c.gpu.name} in {c.nodes} nodes, {_gib(c.gpu.memory)} GiB each",
        f"layout: {layout(config, plan.dp)}; micro-batches of {config.trainer.micro_batch_tokens} tokens, "
        f"{plan.micro_batches} an update on each rank",
        f"a step: {config.batch_prompts} prompts, {config.rollout_budget} rollouts of {work.prompt:g} + "
        f"{work.response:g} tokens on average, {config.algorithm.loss.mini_batches} updates",
    ]


def _alike(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Neighbouring stages of the same needs as one: ("0", s), ("1-2", s)..."""
    groups: list[list[StageMemory]] = []
    for stage in stages:
        if groups and (groups[-1][0].training, groups[-1][0].others) == (stage.training, stage.others):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [(f"{g[0].stage}-{g[-1].stage}" if len(g) > 1 else f"{g[0].stage}", g[0]) for g in groups]


def _memory(plan: Plan) -> list[str]:
    names = list(plan.stages[0].training)
    alike, per_stage = _alike(plan.stages), plan.cluster.gpus // plan.config.parallel.pp
    phases = list(plan.stages[0].others)
    rows = [["stage (ranks)", *names, "reserved", "update", *phases, "verdict"]]
    for name, stage in alike:
        first, last = (int(n) for n in (name.split("-")[0], name.split("-")[-1]))
        ranks = f"{first * per_stage}-{(last + 1) * per_stage - 1}"
        sums = [total + RESERVED for total in (sum(stage.training.values()), *stage.others.values())]
        spare = plan.cluster.gpu.memory - max(sums)
        told = f"fits, {_gib(spare)} left" if spare >= 0 else f"{_gib(-spare)} too much"
        cells = [*(stage.training[n] for n in names), RESERVED, *sums]
        rows.append([f"{name} ({ranks})", *map(_gib, cells), told])
    return ["memory of a rank at the peak of an update, and all of it in the other phases, GiB:", *table(rows)]


def _servers(plan: Plan) -> list[str]:
    s = plan.servers
    if s is None:
        return ["servers: none of this run's own"]
    where = "on the training's GPUs" if plan.config.rollout.placement == "colocated" else f"on {s.gpus} GPUs more"
    kind = f"{plan.config.rollout.quantization} " if plan.config.rollout.quantization else ""
    return [
        f"servers: {s.count} of {s.tp} GPUs {where}; on each GPU {_gib(s.weights)} GiB {kind}weights, "
        f"{_gib(s.pool)} GiB KV cache ({s.kv_bytes_a_token / 1024:.1f} KiB a token), {_gib(SERVER_WORKING)} for graphs "
        "and activations",
        f"  a server holds {s.tokens:,.0f} tokens: {s.longest_sequences:,.1f} sequences of {plan.work.longest}; "
        f"{s.running:,.0f} run at once",
    ]


def _rest(plan: Plan) -> list[str]:
    t, host, budget = plan.times, plan.host, plan.config.rollout_budget
    lines = [
        f"host memory of the fullest node: {_gib(host.peak)} GiB at the peak ("
        + ", ".join(f"{what} {_gib(size)}" for what, size in host.parts.items())
        + f"), {_gib(host.load)} to load a checkpoint; {_host_verdict(plan)}",
        f"checkpoint: {_gib(plan.checkpoint)} GiB each, {plan.config.checkpoint.keep_last} kept; "
        f"a copy of the weights {_gib(plan.pushed)} GiB",
        _save(plan),
        _rollouts(plan),
        "",
        "floor times of a step at the hardware's stated rates, seconds (docs/plan.md: what real ones are):",
        f"  generate {t.generate:.1f}, log-probs {t.logprobs:.1f}, update {t.update:.1f}, weights {t.push:.2f}; "
        f"together {t.step:.1f}{', generated while the ranks train' if t.overlap else ''}",
        f"  of log-probs and update: pipeline bubble {t.bubble:.1f}, communication {t.communication:.1f}",
    ]
    if plan.servers is not None:
        s = plan.servers
        lines += [
            f"  a push brings each server rank {_gib(s.weights)} GiB, {_gib(s.weights * s.gpus)} GiB in all",
            *_proof(plan),
            f"  the servers make at most {budget / t.generate:.1f} rollouts a second; to keep up with training beside "
            f"them it would take {budget / t.training:.1f}",
        ]
        if t.overlap:
            who, whom = ("ranks", "servers") if t.waits > 0 else ("servers", "ranks")
            lines.append(
                f"  the {who} wait {abs(t.waits):.1f} s of each step for the {whom}: with rollout.placement split "
                "`plan --search` divides the GPUs"
            )
    shares = {"generation": t.generate, "log-probs": t.logprobs, "update": t.update, "the weights' push": t.push}
    longest = max(shares, key=lambda name: shares[name])
    fullest = max(plan.stages, key=lambda stage: stage.peak)
    phase = {"update": sum(fullest.training.values()), **fullest.others}
    item = max(phase, key=lambda name: phase[name])
    if plan.stop_before > STOP_BEFORE:
        lines.append(
            f"between two safe points, the end of generation and that of the step, a stop waits at least "
            f"{t.training:.0f} s, in practice up to {SLOWEST} times as long, and for the save: `launch slurm --gpu "
            f"{plan.cluster.gpu.name}` sets --stop-before {plan.stop_before} (the default: {STOP_BEFORE}), "
            "`launch nemo` needs it as an option"
        )
    lines += cautions(plan)
    lines.append(
        f"what limits: {longest} has {shares[longest] / t.step:.0%} of the floor; memory is fullest in {item}, on the "
        f"ranks of stage {fullest.stage}: {_gib(plan.peak)} GiB, most of it {_largest(fullest, item)}"
    )
    return lines


def _save(plan: Plan) -> str:
    every, nodes = plan.config.checkpoint.every, plan.cluster.nodes
    when = {1: "after every step", None: "at a stop alone"}.get(every, f"every {every} steps")
    return (
        f"a save, {when}: each rank writes its own part and sends none of it to another one, "
        f"{_gib(plan.checkpoint)} GiB" + (f", {_gib(plan.checkpoint / nodes)} GiB from each node" if nodes > 1 else "")
    )


def _proof(plan: Plan) -> list[str]:
    every = plan.config.rollout.proof.full_every
    if every is None:
        return []
    return [
        f"  its proof: a sender hashes {_gib(plan.hashed)} GiB, at least {plan.hash_seconds:.2f} s, "
        f"{'at every push' if every == 1 else f'spread over {every} pushes'} (rollout.proof.full_every)"
    ]


def _rollouts(plan: Plan) -> str:
    config = plan.config
    step = stored_step(config.rollout_budget, plan.work.response)
    kept, steps = config.rollout.keep_last, config.trainer.steps
    whole = f"all {steps} steps are {_gib(step * steps)} GiB"
    if kept is not None:
        stay = f"{kept} steps and the one being made are kept, {_gib(step * (kept + 1))} GiB"
    elif config.checkpoint.every is None:
        stay = f"{whole}, and all are kept: without checkpoints (checkpoint.every: null) a resume needs them all"
    else:
        stay = (
            f"{whole}, kept while they take less than {SHARE:.0%} of the free disk, then the newest; "
            "rollout.keep_last keeps a number of steps"
        )
    return f"rollouts on disk: {_gib(step)} GiB a step; {stay}"


def _host_verdict(plan: Plan) -> str:
    """Against the node that the GPU's maker builds; what the user's has is for `preflight`."""
    spare = plan.cluster.gpu.host_memory - plan.host.peak
    node = f"a maker's node of {plan.cluster.gpu.name} has {_gib(plan.cluster.gpu.host_memory)}: "
    return node + (f"fits, {_gib(spare)} left" if spare >= 0 else f"{_gib(-spare)} too much")


def cautions(plan: Plan) -> list[str]:
    """What the figures leave out and this layout may meet."""
    p, spec, dtype = plan.config.parallel, plan.spec, plan.config.model.dtype
    rollout, lines = plan.config.rollout, []
    if plan.idle_gpus > 0:
        lines.append(
            f"{plan.idle_gpus} of {plan.cluster.gpus} GPUs are idle while servers generate: rollout.servers "
            f"{rollout.servers} x rollout.tp {rollout.tp}; leave rollout.servers out, or raise it"
        )
    if rollout.timeout_of() < SLOW_SERVER * plan.longest_response and not plan.timeout_too_short:
        lines.append(_timeout(plan))
    if not plan.cluster.gpu.packed_attention:
        lines.append(
            f"TransformerEngine has no fast attention of packed sequences on {plan.cluster.gpu.name} without "
            "flash-attn, which is not in the figures: torch's takes its place, a call for each distinct length"
        )
    if p.cp > 1:
        scores = formulas.attention_scores(spec, p, dtype, plan.work.longest)
        lines.append(
            f"cp {p.cp} is reckoned with TransformerEngine: torch's own attention, under the mask that cp needs, may "
            f"build the scores, {_gib(scores)} GiB a layer for the longest sequence"
        )
    if spec.num_experts:
        tokens = max(plan.config.trainer.micro_batch_tokens, plan.work.longest) / p.cp
        held, _ = formulas.in_flight(p, spec.num_layers, 0, max(plan.micro_batches, p.pp))
        layers = 1 if plan.config.trainer.recompute == "full" else held
        more = formulas.expert_activations(spec, p, dtype) * tokens * layers
        lines.append(
            f"tokens are taken to spread evenly over the experts: a rank that gets twice its share needs "
            f"{_gib(more)} GiB more"
        )
    return lines


def _timeout(plan: Plan) -> str:
    rollout = plan.config.rollout
    return (
        f"rollout.timeout is {rollout.timeout_of():g} s, and a response of {rollout.max_new_tokens} tokens takes at "
        f"least {plan.longest_response:.0f} s: long responses would be aborted and never trained on; leave it out, or "
        "raise it"
    )


def _largest(stage: StageMemory, phase: str) -> str:
    if phase == "update":
        return max(stage.training, key=lambda name: stage.training[name])
    return "the server" if phase == "generate" else "state and the server's weights"


def verdict(plan: Plan) -> str:
    spare = plan.cluster.gpu.memory - plan.peak
    if spare < 0:
        return f"does not fit: {_gib(-spare)} GiB too much on the fullest rank"
    if plan.server_too_large:
        return (
            f"does not fit: a server needs {_gib(plan.servers.peak)} GiB of a GPU's {_gib(plan.cluster.gpu.memory)}, "
            f"{_gib(SERVER_WORKING)} of them beside weights and KV cache; lower rollout.memory_fraction"
        )
    if not plan.fits:
        return (
            f"does not fit: a server's KV cache holds {plan.servers.tokens:,.0f} tokens, a sequence may have "
            f"{plan.work.longest}; raise rollout.tp or rollout.memory_fraction"
        )
    if plan.timeout_too_short:
        return f"cannot work: {_timeout(plan)}"
    return f"fits: {_gib(spare)} GiB left on the fullest rank"
