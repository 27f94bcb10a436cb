"""Bridge's mappings as functions of tensors, for this rank's own parameters: no rank converts or gathers another's.

A *unit* is what is converted together: a Megatron parameter or, where the folder has one tensor of all experts, the
parameters of all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

from dynamo_megatron.models.mapping import EMBEDDING, OUTPUT_LAYER

EXPERT = re.compile(r"(.*\bmlp)\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


class _Group:
    """In place of a process group in Bridge's mappings: of `count` shares, with the tensors of all shares at hand."""

    def __init__(self, count: int = 1, share: int = 0):
        self.count, self.share = count, share
        self.given: list[list[torch.Tensor]] = []  # what each call of `gather` is answered; empty: record
        self.asked: list[torch.Tensor] = []

    def size(self) -> int:
        return self.count

    def rank(self) -> int:  # the share that converts
        return 0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.asked.append(tensor)
        return self.given[len(self.asked) - 1] if self.given else [tensor] * self.count


def _scatter(self, splits, output_shape, dtype, device, src_rank=0) -> torch.Tensor:
    return splits[self.tp_group.share].to(device=device, dtype=dtype)


MegatronParamMapping.scatter_to_tp_ranks = _scatter
MegatronParamMapping.gather_from_tp_ranks = lambda self, tensor: self.tp_group.gather(tensor)
MegatronParamMapping.broadcast_tensor_to_tp_ranks = lambda self, tensor, src_rank=0: tensor


@dataclass(frozen=True)
class Task:
    """The conversion of one parameter (or buffer that a checkpoint has)."""

    global_param_name: str  # Bridge's
    mapping: MegatronParamMapping
    module: torch.nn.Module
    parameter: torch.Tensor


@dataclass(frozen=True)
class Unit:
    tasks: tuple[Task, ...]
    names: tuple[str, ...]  # of the tensors in the Hugging Face folder
    fused: bool  # one tensor of all experts
    sharded: bool  # over tensor-parallel ranks


class Mappings:
    """Of this rank's parameters. `unmapped`: those that Bridge has no mapping of."""

    def __init__(self, bridge: Any, model: torch.nn.Module):
        self._bridge = bridge._model_bridge
        groups = model.pg_collection
        self.tp_rank, self.tp_size = groups.tp.rank(), groups.tp.size()
        self._bridge.hf_pretrained = bridge._config_only_pretrained  # GPT-OSS's asks it for `config`
        registry = self._bridge.mapping_registry()
        offset = model.layer_offset
        experts = (model.config.num_moe_experts or 0) // groups.ep.size() * groups.ep.rank()
        grouped: dict[str, list[Task]] = {}
        self.unmapped: list[str] = []
        for local, module, parameter in _tensors(model):
            tied = local == OUTPUT_LAYER and model.share_embeddings_and_output_weights
            name = re.sub(r"(?<=decoder\.layers\.)\d+", lambda m: str(int(m[0]) + offset), local)
            if expert := EXPERT.fullmatch(name):
                name = f"{expert[1]}.experts.{expert[2]}.{expert[3]}{int(expert[4]) + experts}"
            mapping = registry.megatron_to_hf_lookup(EMBEDDING if tied else name)
            if mapping is None:
                self.unmapped.append(name)
                continue
            if not hasattr(module, "config"):
                module.config = model.config
            key = mapping.group_key + "|" if getattr(mapping, "is_grouped_export", False) else name
            grouped.setdefault(key, []).append(Task(name, mapping, module, parameter))
        self.units: dict[str, Unit] = {}
        self.copies: dict[str, Unit] = {}  # of the embedding, a tied head on another stage: not sent
        embedding = (registry.megatron_to_hf_lookup(EMBEDDING).hf_param,)
        for key, tasks in grouped.items():
            first = tasks[0]
            fused = key.endswith("|")
            of = first.mapping.hf_param
            names = tuple(of.values()) if isinstance(of, dict) else (of,)
            cut = getattr(first.parameter, "tensor_model_parallel", False) and not first.mapping.is_expert
            of_kind = self.copies if first.global_param_name == OUTPUT_LAYER and names == embedding else self.units
            of_kind[_unit_name(first.global_param_name, fused)] = Unit(tuple(tasks), names, fused, cut)

    def value(self, name: str) -> torch.Tensor:
        """What this rank holds of a unit; of a fused one [experts, ...]."""
        parameters = [task.parameter.detach() for task in self.units[name].tasks]
        return torch.stack(parameters) if self.units[name].fused else parameters[0]

    def whole(self, name: str, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The folder's tensors of a unit from the `value` of all tensor-parallel ranks, or of one if it is not cut."""
        unit = self.units[name]
        of_task = [[shard[n] for shard in shards] for n in range(len(unit.tasks))] if unit.fused else [shards]
        tensors = self.export(unit, of_task)
        return {tensor: tensors[tensor] for tensor in unit.names}

    def load(self, unit: Unit, state: Mapping[str, torch.Tensor], share: int) -> list[torch.Tensor]:
        """Tensor-parallel rank `share`'s values of the unit's parameters from the folder's tensors."""
        weights, values = self._bridge.maybe_modify_loaded_hf_weight(unit.tasks[0].mapping.hf_param, state), []
        for task in unit.tasks:
            _put_groups(task.mapping, _Group(self.tp_size, share))
            values.append(task.mapping.hf_to_megatron(weights, task.module))
        return values

    def export(self, unit: Unit, shards: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The folder's tensors of a unit from its parameters: one list of all ranks' shards for each task."""
        converted = [self._convert(task, of_task) for task, of_task in zip(unit.tasks, shards, strict=True)]
        if not unit.fused:
            return converted[0]
        (name,) = unit.names
        whole = torch.stack([one[name] for one in converted])
        if getattr(unit.tasks[0].mapping, "transpose_on_export", False):
            whole = whole.transpose(-1, -2).contiguous()
        return {name: whole}

    def _convert(self, task: Task, shards: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """A mapping asks all ranks for their parts of what it has: the first calls note what it asks of each shard, the
        last one is answered. Most ask for the shard itself, once: then one call is enough to know."""
        mapping, asked = task.mapping, []
        if len(shards) == 1:
            _put_groups(mapping, _Group())
            return dict(mapping.megatron_to_hf(shards[0], task.module))
        for shard in shards:
            _put_groups(mapping, group := _Group(self.tp_size))
            mapping.megatron_to_hf(shard, task.module)
            asked.append(group.asked)
            if len(group.asked) == 1 and group.asked[0] is shard:
                asked = [[one] for one in shards]
                break
        final = _Group(self.tp_size)
        final.given = [list(of_call) for of_call in zip(*asked, strict=True)]
        _put_groups(mapping, final)
        return dict(mapping.megatron_to_hf(shards[0], task.module))


def _put_groups(mapping: MegatronParamMapping, tp: _Group) -> None:
    one = _Group()
    mapping.set_process_groups_from_pg_collection(SimpleNamespace(pp=one, ep=one, tp=tp, expt_tp=one))


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """Parameters and the buffers that a checkpoint has, with their modules."""
    for prefix, module in model.named_modules():
        lasting = [
            (n, b) for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set
        ]
        for name, tensor in [*module.named_parameters(recurse=False), *lasting]:
            yield f"{prefix}.{name}" if prefix else name, module, tensor


def _unit_name(name: str, fused: bool) -> str:
    """As models/mapping.py names the experts; those of a fused unit are no one expert's."""
    if expert := EXPERT.fullmatch(name):
        if fused:
            return f"{expert[1]}.all_experts.{expert[2]}.{expert[3]}"
        return f"{expert[1]}.experts.local_experts.{expert[4]}.{expert[2]}.{expert[3]}"
    return name
