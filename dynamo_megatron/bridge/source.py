"""Megatron's model of a Hugging Face config, made by Bridge's provider, as the chunks that the policy runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from transformers import AutoConfig

from dynamo_megatron.bridge.loading import load_model
from dynamo_megatron.bridge.tensors import Mappings
from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import KV_DOWN, OUTPUT_LAYER, is_expert
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.policy.attention import PackedAttention
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel, run_settings


class BridgeModel(PolicyModel):
    """What Bridge's provider makes, a GPTModel, in the policy's place: with Megatron's own RoPE."""

    mappings: Mappings

    def load(self, path: str, spec: ModelSpec) -> set[str]:
        """As `load_model`, from a folder, whose tensors a rank reads as far as it needs them."""
        folder = SafetensorsFolder(path, spec)
        try:
            return load_model(self, folder.get)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


def build(hf_config: Any, dtype: torch.dtype, parallel: ParallelConfig, recompute: str = "none") -> BridgeModel:
    """This rank's stage of the model of a transformers config, its parameters NaN.

    Megatron's parallel groups must be there. Raises what Bridge raises: ValueError and others.
    """
    bridge = AutoBridge.from_hf_config(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        **run_settings(parallel, dtype, recompute),
        "expert_tensor_parallel_size": 1,
        "vocab_size": -(-hf_config.vocab_size // (16 * parallel.tp)) * 16 * parallel.tp,
        "should_pad_vocab": False,
        "attention_backend": AttnBackend.auto,  # Megatron refuses several in a process
        # No token is dropped; an auxiliary loss's gradient would not be scaled as the policy loss is.
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # policy/routing.py moves them, by real tokens and once a step
        "moe_router_dtype": "fp32",
        "moe_shared_expert_overlap": False,
        "moe_permute_fusion": torch.cuda.is_available(),
        "bias_activation_fusion": provider.bias_activation_fusion and provider.activation_func is not F.gelu,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    for name, value in settings.items():
        assert hasattr(provider, name), f"megatron-core moved {name}"
        setattr(provider, name, value)
    provider.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    provider._pg_collection = groups
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    model = provider.provide(pre_process=stage == 0, post_process=stage == last)
    model.__class__ = BridgeModel
    for layer in model.decoder.layers if provider.softmax_type != "vanilla" else ():
        # TransformerEngine 2.11 has no sinks for packed sequences.
        layer.self_attention.core_attention = PackedAttention(
            model.config, layer.layer_number, softmax_scale=model.config.softmax_scale, pg_collection=groups
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(torch.nan)
            if is_expert(name):  # it is whole on its rank, and sees tokens of its own (policy/model.py)
                parameter.allreduce = parameter.sequence_parallel = False
    model.mappings = Mappings(bridge, model)
    return model


def build_chunks(spec: ModelSpec, config: Config, layout: Layout) -> list[PolicyModel]:
    """As policy/model.py's, one chunk; completes `spec.bridged` with what all ranks hold. Collective. Raises ValueError
    on every rank."""
    hf_config, dtype = AutoConfig.from_pretrained(config.model.path), getattr(torch, config.model.dtype)
    model = build(hf_config, dtype, config.parallel, config.trainer.recompute).to(layout.device)
    here = {name: (unit.names, unit.fused) for name, unit in model.mappings.units.items()}
    if spec.tied:
        here.pop(OUTPUT_LAYER, None)  # a copy of the embedding on another stage: not sent
    found = {name: unit for of_rank in layout.gather(here) for name, unit in of_rank.items()}
    for name in sorted(found, key=lambda name: name.replace(KV_DOWN, "self_attention.linear_q_down_proj_kv")):
        names, fused = found[name]
        if fused and config.parallel.ep > 1:
            raise InputError(
                f"parallel.ep: {config.parallel.ep}, but {names[0]} holds all experts in one tensor; use 1"
            )
        spec.bridged.parameters[name] = names
    return [model]
