"""Megatron's gradient buffers and distributed Adam, and its step with the settings of this run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronConfig

from dynamo_megatron.config import OptimizerConfig
from dynamo_megatron.policy.host_adam import HostAdam
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel


def overlaps(layout: Layout) -> bool:
    """Whether gradients are reduced while the last micro-batch's backward pass still runs. Parameters are gathered with
    the optimizer's step, never in the next forward pass: weight syncs, saves and the head read them outside of any
    module."""
    return torch.cuda.is_available() and layout.dp_cp.size() > 1


def wrap(chunks: Sequence[PolicyModel], layout: Layout) -> list[DistributedDataParallel]:
    """Wraps each chunk in Megatron's DistributedDataParallel, which holds the gradient buffers."""
    megatron, overlap = chunks[0].config, overlaps(layout)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    ddp = [DistributedDataParallel(megatron, config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    if overlap:  # else every micro-batch would count as the last one
        megatron.no_sync_func = ddp[0].no_sync if len(ddp) == 1 else [chunk.no_sync for chunk in ddp]
    return ddp


def build_optimizer(config: OptimizerConfig, ddp: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    # megatron-core 0.19 finds the parameter groups of a saved optimizer by their learning rates, too, and would fail
    # where a run is resumed with another one.
    assert hasattr(distrib_optimizer, "param_group_identifier_keys"), "megatron-core moved its groups' keys"
    distrib_optimizer.param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    _fix_torch_adam_checkpoints()
    megatron = ddp[0].module.config
    settings = MegatronConfig(
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
    )
    if config.cpu_offload:  # the optimizer then gets runs of the model's parameters, and makes its own main weights
        assert hasattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8"), "megatron-core renamed it"
        settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    optimizer = get_megatron_optimizer(settings, ddp)
    if config.cpu_offload:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not part.is_stub_optimizer:
                part.optimizer = HostAdam(part.optimizer.param_groups)
    return optimizer


def optimizer_step(optimizer: MegatronOptimizer, config: OptimizerConfig, learning_rate: float) -> None:
    """Makes a step with the gradients from `prepare_grads`. All settings are set every time: a loaded checkpoint brings
    its own, and in Megatron a scheduler, not used here, applies wd_mult, which is 0 for norms and biases."""
    for group in optimizer.param_groups:
        decay = config.weight_decay * group["wd_mult"]
        group.update(lr=learning_rate, weight_decay=decay, betas=config.betas, eps=config.eps)
        if "fused" in group:  # torch's Adam
            group.update(fused=True, foreach=False)
    optimizer.step()


def _fix_torch_adam_checkpoints() -> None:
    """Makes Megatron's distributed optimizer save and load torch's Adam (no TransformerEngine, no Apex) correctly.

    Stock megatron-core (0.16 to 0.20) fails on the key "step", needs a step before it can save, and after a load
    shares one step tensor between all parameters, which torch's Adam then counts up once per parameter.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE or getattr(distrib_optimizer, "_dynamo_megatron_fixed", False):
        return
    optimizer_class = distrib_optimizer.DistributedOptimizer
    assert hasattr(optimizer_class, "_set_main_param_and_optimizer_states"), "megatron-core moved its state setter"

    @torch.no_grad()
    def set_states(self, model_param, tensors):
        if isinstance(self.optimizer, HostAdam):
            return stock_set(self, model_param, tensors)
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        own = {"param": main_param, **self.optimizer.state[main_param]}
        for key, value in tensors.items():
            if key in own and key != "step":
                own[key].copy_(value)

    stock_set = optimizer_class._set_main_param_and_optimizer_states
    stock_sharded, stock_load = optimizer_class.sharded_state_dict, optimizer_class.load_state_dict

    def sharded_state_dict(self, *args, **kwargs):
        for group in [] if isinstance(self.optimizer, HostAdam) else self.optimizer.param_groups:
            for p in group["params"]:
                if "step" not in self.optimizer.state[p]:
                    zeros = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[p].update(step=torch.zeros((), device=p.device), **zeros)
        return stock_sharded(self, *args, **kwargs)

    def load_state_dict(self, state_dict):
        stock_load(self, state_dict)
        for p, state in {} if isinstance(self.optimizer, HostAdam) else self.optimizer.state.items():
            state["step"] = state["step"].to(p.device, torch.float32, copy=True)

    optimizer_class._set_main_param_and_optimizer_states = set_states
    optimizer_class.sharded_state_dict = sharded_state_dict
    optimizer_class.load_state_dict = load_state_dict
    distrib_optimizer._dynamo_megatron_fixed = True
