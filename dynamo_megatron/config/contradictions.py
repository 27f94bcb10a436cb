"""What options of several sections contradict each other, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_megatron.config import Config


def sequential_faults(config: Config, budget: int, low: int, high: int) -> Iterator[str]:
    algorithm, rule = config.algorithm, config.algorithm.sequential
    if rule is None:
        return
    for fault in rule.faults_in(budget, config.data.batch_prompts, low, high):
        yield f"algorithm.sequential.{fault}"
    if algorithm.dynamic_sampling is not None:
        yield "algorithm.sequential: does not go with algorithm.dynamic_sampling; set one of them to null"
    if (kind := algorithm.allocation.kind) != "uniform":
        yield f"algorithm.sequential: has counts of its own; set algorithm.allocation.kind to uniform, not {kind}"
    advantage = algorithm.advantage
    if rule.kind == "reinforce_ada" and advantage.kind not in ("rloo", "history"):
        yield (
            "algorithm.sequential: reinforce_ada needs a baseline of other rollouts than the own one; set "
            f"algorithm.advantage.kind to rloo or history, not {advantage.kind}"
        )
    if rule.kind == "reinforce_ada" and advantage.overlong_buffer is not None:
        yield "algorithm.advantage.overlong_buffer: reinforce_ada has rollouts without its penalty; set it to null"


def critic_faults(config: Config) -> Iterator[str]:
    if (kind := config.algorithm.advantage.kind) != "gae":
        if config.critic != type(config.critic)():
            yield f"critic: only algorithm.advantage.kind gae has one, and it is {kind}; leave it out"
    elif config.model.lora is not None:
        yield (
            "model.lora: adapters of the policy beside a whole critic are not supported; set it to null, or "
            "algorithm.advantage.kind to rloo"
        )


def staleness_faults(config: Config) -> Iterator[str]:
    rollout, algorithm, loss = config.rollout, config.algorithm, config.algorithm.loss
    if loss.old == "engine" and algorithm.rollout_correction is not None:
        yield (
            "algorithm.rollout_correction: corrects from the engine's logprobs to the old policy's, and with "
            "algorithm.loss.old engine the loss does so; set one of them to its default"
        )
    if rollout.max_staleness == 0:
        return
    what = f"rollout.max_staleness: {rollout.max_staleness}"
    for key in ("dynamic_sampling", "sequential"):
        if getattr(algorithm, key) is not None:
            yield f"{what} samples in advance, and algorithm.{key} needs the outcomes of the same step; set it to null"
    if rollout.stop and rollout.at_sync == "partial":
        yield (
            f"{what} interrupts responses at a weight sync, and a server does not detect a stop text (rollout.stop) "
            "that begins before it and ends after it; set rollout.at_sync to drain"
        )
    if algorithm.rollout_correction is None and loss.old == "policy" and loss.function is None:
        yield (
            f"{what} trains on tokens of older weights, which the loss has to correct for; set "
            "algorithm.rollout_correction to {level: sequence}, or to {level: token} for long responses"
            f"{', or algorithm.loss.old to engine' if rollout.max_staleness == 1 else ''} (docs/methods.md)"
        )


def quantization_faults(config: Config) -> Iterator[str]:
    algorithm, loss, quantization = config.algorithm, config.algorithm.loss, config.rollout.quantization
    if quantization is None:
        return
    if config.model.dtype != "bfloat16":
        yield (
            f"rollout.quantization: SGLang computes {quantization} layers in bfloat16, and model.dtype is "
            f"{config.model.dtype}; set model.dtype to bfloat16, or leave rollout.quantization out"
        )
    if algorithm.rollout_correction is None and loss.old == "policy" and loss.function is None:
        yield (
            f"rollout.quantization: {quantization} samples from rounded weights, and the loss has to correct that; set "
            "algorithm.rollout_correction to {level: token} or {level: sequence}, or algorithm.loss.old to engine"
        )


def bridge_faults(config: Config, training: bool) -> Iterator[str]:
    if config.model.source != "bridge":
        return
    others = {key: folder for key, folder in config.frozen_models.items() if folder != config.model.path}
    unsupported = {
        "model.lora": config.model.lora is not None,
        "parallel.cp": config.parallel.cp > 1,
        "parallel.vpp": config.parallel.vpp > 1,
        "parallel.last_stage_layers": config.parallel.last_stage_layers is not None,
        "algorithm.advantage.kind": config.algorithm.advantage.kind == "gae",
        "rollout.quantization": config.rollout.quantization is not None,
        **dict.fromkeys(others, True),
    }
    for key, asked in unsupported.items():
        if asked:
            yield f"{key}: not supported with model.source: bridge; leave it out"
    if training and config.rollout.engine == "sglang" and config.rollout.proof.checksums:
        yield (
            "rollout.proof.checksums: how a server holds a model of Bridge's is not known; set it to false with "
            "model.source: bridge"
        )
