"""Bridge's mappings for this rank's own parameters: no pipeline stage or expert-parallel rank converts another's.

A *unit* is what is converted together: a Megatron parameter or, where the folder has one tensor of all experts, the
parameters of all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.param_mapping import AutoMapping, MegatronParamMapping

from dynamo_megatron.models.mapping import EMBEDDING, OUTPUT_LAYER

# An expert's number in the names of SequentialMLP's parameters and of grouped linears'.
EXPERT = re.compile(r"(experts\.local_experts\.|experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


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


class Task(NamedTuple):
    """The conversion of one parameter (or buffer that a checkpoint has)."""

    mapping: MegatronParamMapping
    module: torch.nn.Module
    parameter: torch.Tensor


class Unit(NamedTuple):
    names: tuple[str, ...]  # of the tensors in the Hugging Face folder
    fused: bool  # one tensor of all experts
    tasks: list[Task]


class Mappings:
    """Of this rank's parameters: `units` by Megatron's global name. `unmapped`: those that Bridge has no mapping of."""

    def __init__(self, bridge: Any, model: torch.nn.Module):
        self._bridge, groups = bridge._model_bridge, model.pg_collection
        self._bridge.hf_pretrained = bridge._config_only_pretrained  # GPT-OSS's asks it for `config`
        registry = self._bridge.mapping_registry()
        first_expert = (model.config.num_moe_experts or 0) // groups.ep.size() * groups.ep.rank()
        self.compares = groups.tp.rank() == 0
        self.units: dict[str, Unit] = {}
        self.unmapped: list[str] = []
        for local, parameter in model.state_dict(keep_vars=True).items():
            if local.endswith("_extra_state"):
                continue
            module = model.get_submodule(local.rpartition(".")[0])
            own = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda n: str(int(n[0]) + model.layer_offset), local)
            own = EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", own)
            grouped = re.sub(r"local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))$", r"\2\1", own)
            tied = local == OUTPUT_LAYER and model.share_embeddings_and_output_weights
            mapping = registry.megatron_to_hf_lookup(EMBEDDING if tied else grouped)
            if mapping is None:
                self.unmapped.append(own)
                continue
            if own != grouped:  # all families have mappings of grouped experts, not all of SequentialMLP's
                mapping.megatron_param = own
                mapping = mapping.resolve(())
            if not hasattr(module, "config"):
                module.config = model.config
            fused = getattr(mapping, "is_grouped_export", False)
            expert = "all_experts" if fused else r"experts.local_experts.\3"  # as models/mapping.py names one
            name = re.sub(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$", rf"{expert}.\1.\2", grouped)
            names = mapping.hf_param
            names = tuple(names.values()) if isinstance(names, dict) else (names,)
            unit = self.units.setdefault(name, Unit(names, fused, []))
            unit.tasks.append(Task(mapping, module, parameter))

    def load(self, name: str, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """This rank's values of a unit's parameters from the folder's tensors."""
        tasks = self.units[name].tasks
        weights = self._bridge.maybe_modify_loaded_hf_weight(tasks[0].mapping.hf_param, tensors)
        return [task.mapping.hf_to_megatron(weights, task.module) for task in tasks]

    @torch.no_grad()
    def export(self, name: str) -> dict[str, torch.Tensor]:
        """The folder's tensors of a unit, on the first tensor-parallel rank; on the others nothing of use. A collective
        over them where the unit is cut."""
        unit = self.units[name]
        converted = [task.mapping.megatron_to_hf(task.parameter.detach(), task.module) for task in unit.tasks]
        if not unit.fused:
            return {tensor: converted[0][tensor] for tensor in unit.names}
        (tensor,) = unit.names
        whole = torch.stack([one[tensor] for one in converted])
        if getattr(unit.tasks[0].mapping, "transpose_on_export", False):
            whole = whole.transpose(-1, -2).contiguous()
        return {tensor: whole}
