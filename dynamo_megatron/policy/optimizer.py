"""Megatron's distributed Adam, and its step with the settings of this run."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig

from dynamo_megatron.config import OptimizerConfig
from dynamo_megatron.policy.megatron_versions import match_groups_by_kind

# Torch's Adam raises at numbers beyond float32. This one ruins all weights too, and `Policy.check_weights` reports it.
UNUSABLE = 1e30


def build_optimizer(config: OptimizerConfig, ddp: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    match_groups_by_kind()
    megatron = ddp[0].module.config
    return get_megatron_optimizer(
        MegatronConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=megatron.bf16,
            params_dtype=megatron.params_dtype,
            use_distributed_optimizer=True,
        ),
        ddp,
    )


def optimizer_step(optimizer: MegatronOptimizer, config: OptimizerConfig, learning_rate: float) -> None:
    """Makes a step with the gradients from `prepare_grads`. All settings are set every time: a loaded checkpoint brings
    its own, and in Megatron a scheduler, not used here, applies wd_mult, which is 0 for norms and biases."""
    for group in optimizer.param_groups:
        decay = min(config.weight_decay, UNUSABLE) * group["wd_mult"]
        group.update(lr=min(learning_rate, UNUSABLE), weight_decay=decay, betas=config.betas, eps=config.eps)
    optimizer.step()
