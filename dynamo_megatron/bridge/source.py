"""Megatron's model of a Hugging Face config, made by Bridge's provider, as the chunks that the policy runs."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from dynamo_megatron.bridge.loading import LazyTensors, load_model
from dynamo_megatron.bridge.tensors import Mappings
from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import EMBEDDING, LAYER, expert_number
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.policy.batch import MicroBatch
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel, Segments
from dynamo_megatron.policy.routing import Routing


def _leave_unset(weight: torch.Tensor) -> torch.Tensor:
    return weight


class BridgeModel(PolicyModel):
    """What Bridge's provider makes, a GPTModel, in the policy's place: Megatron's own packing, RoPE and attention."""

    mappings: Mappings

    def load(self, path: str, spec: ModelSpec) -> set[str]:
        """As `load_model`, from a folder, whose tensors a rank reads as far as it needs them."""
        with SafetensorsFolder(path, spec) as folder:
            try:
                return load_model(self, LazyTensors(folder))
            except InputError as error:
                raise InputError(f"{path}: {error}") from None

    def forward_packed(self, micro_batch: MicroBatch, routing: Routing | None = None) -> torch.Tensor:
        longest, bounds = int(micro_batch.lengths.max()), micro_batch.cu_seqlens
        packed = Segments(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            routing=routing,
        )
        return self(micro_batch.tokens, micro_batch.positions, None, packed_seq_params=packed)


def build(hf_config: Any, dtype: torch.dtype, parallel: ParallelConfig, **options: Any) -> BridgeModel:
    """This rank's stage of the model of a transformers config, its parameters NaN. `options`: of TransformerConfig.

    Megatron's parallel groups must be there. Raises what Bridge raises: ValueError and others.
    """
    bridge = AutoBridge.from_hf_config(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    cuda = torch.cuda.is_available()
    settings = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": parallel.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "vocab_size": -(-hf_config.vocab_size // (16 * parallel.tp)) * 16 * parallel.tp,
        "should_pad_vocab": False,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # No token is dropped; an auxiliary loss's gradient would not be scaled as the policy loss is.
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # policy/routing.py moves them, by real tokens and once a step
        "moe_router_dtype": "fp32",
        "moe_shared_expert_overlap": False,
        "moe_permute_fusion": cuda,
        "bias_activation_fusion": provider.bias_activation_fusion and provider.activation_func is not F.gelu,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not cuda,
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        "batch_p2p_comm": cuda,
        "batch_p2p_sync": cuda,
        "deallocate_pipeline_outputs": cuda,
        **options,
    }
    for name, value in settings.items():
        assert hasattr(provider, name), f"megatron-core moved {name}"
        setattr(provider, name, value)
    provider.finalize()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # what Megatron set for another model
        os.environ.pop(name, None)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    model = provider.provide(pre_process=stage == 0, post_process=stage == last)
    model.__class__ = BridgeModel
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.mappings = Mappings(bridge, model)
    for name, parameter in model.named_parameters():
        if "mlp.experts." in name:  # each is whole on its rank, and sees tokens of its own (policy/model.py)
            parameter.allreduce = False
    return model


def build_chunks(spec: ModelSpec, config: Config, layout: Layout) -> list[PolicyModel]:
    """As policy/model.py's, one chunk; completes `spec.bridged` with what all ranks hold. Collective. Raises ValueError
    on every rank."""
    recompute = config.trainer.recompute
    options = {
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_method": "uniform" if recompute == "full" else None,
        "recompute_num_layers": 1 if recompute == "full" else None,
    }
    hf_config = AutoConfig.from_pretrained(config.model.path)
    model = build(hf_config, getattr(torch, config.model.dtype), config.parallel, **options).to(layout.device)
    here = {name: (unit.names, unit.sharded, unit.fused) for name, unit in model.mappings.units.items()}
    found = {name: unit for of_rank in layout.gather(here) for name, unit in of_rank.items()}
    for name in sorted(found, key=_place):
        names, sharded, fused = found[name]
        if fused and config.parallel.ep > 1:
            raise InputError(
                f"parallel.ep: {config.parallel.ep}, but {names[0]} holds all experts in one tensor; use 1"
            )
        spec.bridged.parameters[name] = names
        if sharded:
            spec.bridged.sharded.add(name)
    return [model]


def _place(name: str) -> tuple[int, ...]:
    """Sorts the whole model's parameters as they are passed, and linear_kv_down_proj behind linear_q_down_proj."""
    if layer := LAYER.fullmatch(name):
        return 1, int(layer[1]), expert_number(name) or 0, "_down_proj" not in name
    return (0,) if name == EMBEDDING else (2,)
