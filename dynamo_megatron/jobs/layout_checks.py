"""Whether model, layout and number of ranks fit and the data is there, before any rank starts."""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import torch

from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError
from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.data.readers import DATASETS
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.fp8 import check_fp8_shapes
from dynamo_megatron.rollout.servers.fleet import training_nodes

MOST_ON_A_CORE = 8  # ranks of servers, where there are no GPUs


def check_layout(config: Config, world_size: int) -> ModelSpec:
    """Raises ConfigError where model, layout and the number of ranks do not fit."""
    try:
        spec = load_model_config(config.model.path, config.model.family)
        for key, folder in config.frozen_models.items():
            if folder != config.model.path:
                check_reference(spec, folder, key)
    except InputError as error:
        raise ConfigError(str(error)) from None
    check_ranks(config, spec, world_size, gpus=torch.cuda.is_available())
    return spec


def missing_data(config: Config) -> list[str]:
    """A line for each file of problems that a training would read and that is not there."""
    sources = {"data.source": config.data.source, "eval.data": config.eval.data if config.eval.every else None}
    return [
        f"{key}: there is no file {source}"
        for key, source in sources.items()
        if source and not source.startswith(DATASETS) and source.endswith((".jsonl", ".parquet"))
        if not os.path.isfile(source)
    ]


def check_ranks(config: Config, spec: ModelSpec, world_size: int, *, gpus: bool = True) -> None:
    """Raises ConfigError where the layout fits the model or not the number of ranks. `gpus`: it is for a machine that
    has some."""
    p = config.parallel
    if world_size % p.model_ranks:
        raise ConfigError(
            f"parallel: {world_size} ranks can't be cut into tp {p.tp} x pp {p.pp} x cp {p.cp} = {p.model_ranks}; "
            "start a multiple of that"
        )
    if (world_size // p.pp) % p.ep:
        raise ConfigError(
            f"parallel.ep: {p.ep} does not divide the {world_size // p.pp} ranks of a pipeline stage "
            f"({world_size} ranks, pp {p.pp})"
        )
    try:
        spec.check_parallel(p.tp, p.pp, vpp=p.vpp, ep=p.ep)
        if config.rollout.quantization is not None:
            check_fp8_shapes(spec, config.rollout.tp)
    except InputError as error:
        raise ConfigError(str(error)) from None
    if config.rollout.max_staleness and config.rollout.placement == "colocated" and gpus:
        raise ConfigError(
            f"rollout.max_staleness: {config.rollout.max_staleness} has servers generate while the ranks train, and "
            "colocated ones have the same GPUs; set rollout.placement to split, or max_staleness to 0"
        )
    if spec.num_experts and p.tp > 1 and not p.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel: a mixture of experts under tensor parallelism needs it; set it to true"
        )


def check_reference(spec: ModelSpec, folder: str, key: str) -> None:
    """Raises ValueError where the model that `key` names is none, or not of the policy's shape."""
    try:
        if is_torch_dist(folder):  # a run's checkpoint, or a converted model
            open_weights(folder, spec)
            return
        reference = load_model_config(folder, spec.family).dimensions()
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    for name, own in spec.dimensions().items():
        if reference[name] != own and name != "max_positions":
            raise InputError(
                f"{key}: {folder} has {name} {reference[name]}, the policy {own}; "
                "it must be a model of the policy's shape"
            )


def check_servers_here(rollout: RolloutConfig) -> None:
    """Raises ConfigError where this node has no room for its share of the colocated servers, or no `python` for
    them."""
    if rollout.engine != "sglang" or rollout.placement != "colocated":
        return
    ranks, gpus, cores = -(-rollout.servers // training_nodes()) * rollout.tp, torch.cuda.device_count(), os.cpu_count()
    if ranks > (gpus or MOST_ON_A_CORE * cores):
        raise ConfigError(
            f"rollout.servers: {rollout.servers} servers of {rollout.tp} ranks (rollout.tp) have {ranks} on this "
            f"machine, which has {f'{gpus} GPUs' if gpus else f'{cores} cores'}; ask for fewer"
        )
    if rollout.python is not None and shutil.which(rollout.python) is None:
        raise ConfigError(
            f"rollout.python: there is no program {rollout.python} here; name the python of an environment with SGLang"
        )


def describe_layout(config: Config, spec: ModelSpec, ranks: int) -> dict[str, Any]:
    """The derived values that every job shows."""
    p = config.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "dp": ranks // p.model_ranks}
    extra = {"chunks a stage": p.vpp, "expert-parallel": p.ep}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "cp")
    layout += "".join(f", {name} {size}" for name, size in extra.items() if size > 1)
    experts = ""
    if spec.num_experts:
        experts = f", {spec.num_experts} experts, {spec.router_topk} a token, routers without auxiliary loss"
    return {
        "layout": f"{ranks} ranks = {layout}{', sequence-parallel' if p.sequence_parallel else ''}",
        "device": "CUDA" if torch.cuda.is_available() else "CPU",
        "model": f"{spec.family}, {spec.num_layers} layers, vocabulary {spec.vocab_size} "
        f"(padded to {spec.padded_vocab(p.tp)}), {'tied' if spec.tied else 'untied'} head{experts}",
    }


def on_this_machine(config: Config, ranks: int) -> Config:
    """With what follows from its GPUs, if it has any; `ranks`: of all nodes of the run."""
    return config.with_servers(ranks, training_nodes()) if torch.cuda.is_available() else config


def default_ranks(config: Config) -> int:
    return torch.cuda.device_count() or math.lcm(config.parallel.model_ranks, config.parallel.pp * config.parallel.ep)
