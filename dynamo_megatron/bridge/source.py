"""Megatron's model of a Hugging Face config, made by Bridge's provider, as the chunks that the policy runs; Bridge's
mappings are used for this rank's own parameters: no pipeline stage or expert-parallel rank converts another's.

A *unit* is what is converted together: a Megatron parameter or, where the folder has one tensor of all experts, the
parameters of all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from transformers import AutoConfig

from dynamo_megatron.config import Config, ParallelConfig
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import EMBEDDING, KV_DOWN, OUTPUT_LAYER, global_name, is_expert
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.policy.attention import PackedAttention
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import EXPERT_SETTINGS, PolicyModel, run_settings


def _take(mapping, splits, output_shape, dtype, device, src_rank=0) -> torch.Tensor:
    return splits[dist.get_rank(mapping.tp_group)].to(device=device, dtype=dtype)


def _gather(mapping, tensor: torch.Tensor) -> list[torch.Tensor]:
    """On the first tensor-parallel rank the shards of all; on the others, whose result counts for nothing, its own."""
    tensor, ranks = tensor.contiguous(), mapping.tp_size
    parts = [torch.empty_like(tensor) for _ in range(ranks)] if dist.get_rank(mapping.tp_group) == 0 else None
    dist.gather(tensor, parts, group=mapping.tp_group, group_dst=0)
    return parts or [tensor] * ranks


# Each rank loads by itself: it splits as the first tensor-parallel rank would and takes its own part. Pipeline stages
# and expert-parallel ranks know nothing of each other.
MegatronParamMapping.tp_rank = property(lambda mapping: 0)
MegatronParamMapping.pp_size = MegatronParamMapping.ep_size = property(lambda mapping: 1)
MegatronParamMapping.scatter_to_tp_ranks = _take
MegatronParamMapping.broadcast_tensor_to_tp_ranks = lambda mapping, tensor, src_rank=0: tensor
MegatronParamMapping.gather_from_tp_ranks = _gather
AutoMapping.register_module_type("PackedAttention", "column")


class Unit(NamedTuple):
    names: tuple[str, ...]  # of the tensors in the Hugging Face folder
    fused: bool  # one tensor of all experts
    # Of each parameter, or buffer that a checkpoint has: its mapping, its module, itself
    parts: list[tuple[MegatronParamMapping, torch.nn.Module, torch.Tensor]]


class BridgeModel(PolicyModel):
    """What Bridge's provider makes, a GPTModel, in the policy's place: with Megatron's own RoPE. `units`: of this
    rank's parameters, by Megatron's global name. `padding`: rows of the embedding that the folder lacks."""

    units: dict[str, Unit]
    padding: int

    def find_units(self, bridge: AutoBridge) -> None:
        """Sets `units`. Raises InputError naming a parameter that Bridge has no mapping of."""
        self._bridge, groups = bridge._model_bridge, self.pg_collection
        self._bridge.hf_pretrained = bridge._config_only_pretrained  # GPT-OSS's asks it for `config`
        registry = self._bridge.mapping_registry()
        first_expert = (self.config.num_moe_experts or 0) // groups.ep.size() * groups.ep.rank()
        self.units = {}
        for local, parameter in self.state_dict(keep_vars=True).items():
            if local.endswith("_extra_state"):
                continue
            module = self.get_submodule(local.rpartition(".")[0])
            name = global_name(local, self.layer_offset, first_expert)
            grouped = re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$", r"\2\1", name)
            tied = local == OUTPUT_LAYER and self.share_embeddings_and_output_weights
            mapping = registry.megatron_to_hf_lookup(EMBEDDING if tied else grouped)
            if mapping is None:
                raise InputError(f"Bridge has no tensor for Megatron's parameter {name}")
            if "local_experts" in local:  # all families have mappings of grouped experts, not all of SequentialMLP's
                mapping.megatron_param = name
                mapping = mapping.resolve(())
            if not hasattr(module, "config"):
                module.config = self.config
            names = mapping.hf_param
            names = tuple(names.values()) if isinstance(names, dict) else (names,)
            if fused := getattr(mapping, "is_grouped_export", False):
                if groups.ep.size() > 1:
                    raise InputError(f"parallel.ep: more than 1, but {names[0]} holds all experts in one tensor; use 1")
                name = re.sub(r"experts\.local_experts\.\d+", "all_experts", name)
            self.units.setdefault(name, Unit(names, fused, [])).parts.append((mapping, module, parameter))

    def convert(self, name: str, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """This rank's values of a unit's parameters from the folder's tensors."""
        parts = self.units[name].parts
        if self.padding and name in (EMBEDDING, OUTPUT_LAYER):
            tensors = {tensor: F.pad(value, (0, 0, 0, self.padding)) for tensor, value in tensors.items()}
        weights = self._bridge.maybe_modify_loaded_hf_weight(parts[0][0].hf_param, tensors)
        return [mapping.hf_to_megatron(weights, module) for mapping, module, _ in parts]

    @torch.no_grad()
    def export(self, name: str) -> dict[str, torch.Tensor]:
        """The folder's tensors of a unit, on the first tensor-parallel rank; on the others nothing of use. A collective
        over them where the unit is cut."""
        unit = self.units[name]
        converted = [mapping.megatron_to_hf(value.detach(), module) for mapping, module, value in unit.parts]
        if not unit.fused:
            rows = -self.padding or None if name in (EMBEDDING, OUTPUT_LAYER) else None
            return {tensor: converted[0][tensor][:rows] for tensor in unit.names}
        (tensor,) = unit.names
        whole = torch.stack([one[tensor] for one in converted])
        if getattr(unit.parts[0][0], "transpose_on_export", False):
            whole = whole.transpose(-1, -2).contiguous()
        return {tensor: whole}


def build(hf_config: Any, dtype: torch.dtype, parallel: ParallelConfig, recompute: str = "none") -> BridgeModel:
    """This rank's stage of the model of a transformers config, its parameters NaN.

    Megatron's parallel groups must be there. Raises what Bridge raises: ValueError and others.
    """
    bridge = AutoBridge.from_hf_config(hf_config)
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        **run_settings(parallel, dtype, recompute),
        **EXPERT_SETTINGS,
        "vocab_size": -(-hf_config.vocab_size // (16 * parallel.tp)) * 16 * parallel.tp,
        "should_pad_vocab": False,
        "attention_backend": AttnBackend.auto,  # Megatron refuses several in a process
        "moe_router_bias_update_rate": 0.0,  # policy/routing.py moves them, by real tokens and once a step
        "moe_shared_expert_overlap": False,
        "moe_permute_fusion": torch.cuda.is_available(),
        # Megatron's fused one clamps before it adds a separate bias
        "bias_activation_fusion": provider.bias_activation_fusion
        and provider.activation_func is not F.gelu
        and provider.activation_func_clamp_value is None,
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
    model.__class__, model.padding = BridgeModel, settings["vocab_size"] - hf_config.vocab_size
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
    model.find_units(bridge)
    return model


def build_chunks(spec: ModelSpec, config: Config, layout: Layout) -> list[PolicyModel]:
    """As policy/model.py's, one chunk; completes `spec.bridged` with what all ranks hold. Collective. Raises ValueError
    on every rank."""
    hf_config, dtype = AutoConfig.from_pretrained(config.model.path), getattr(torch, config.model.dtype)
    model = build(hf_config, dtype, config.parallel, config.trainer.recompute).to(layout.device)
    here = {name: unit.names for name, unit in model.units.items()}
    if spec.tied:
        here.pop(OUTPUT_LAYER, None)  # a copy of the embedding on another stage: not sent
    found = {name: names for of_rank in layout.gather(here) for name, names in of_rank.items()}
    in_order = sorted(found, key=lambda name: name.replace(KV_DOWN, "self_attention.linear_q_down_proj_kv"))
    spec.bridged.parameters.update({name: found[name] for name in in_order})
    return [model]
