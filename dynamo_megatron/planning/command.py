"""`dynamo-megatron plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.jobs.start_checks import check_ranks
from dynamo_megatron.models import FAMILIES, ModelSpec, load_model_config
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning.hardware import GIB, GPUS, Cluster
from dynamo_megatron.planning.plan import Plan, make_plan, workload
from dynamo_megatron.planning.report import describe
from dynamo_megatron.planning.search import ranked, search_table

# Keys that training needs and a plan does not.
UNNEEDED = {"data": {"source": "none"}, "output_dir": "none"}


def model_spec(config: Config) -> tuple[ModelSpec, str]:
    """(the model's shape, a text that says where it comes from). Raises ConfigError."""
    path, family = config.model.path, config.model.family
    if config.model.source == "bridge":
        raise ConfigError("model.source: bridge builds models whose memory and time are not planned")
    shape = {name.lower(): model["config"] for name, model in PUBLISHED.items()}.get(Path(path).name.lower())
    if Path(path).is_dir() or shape is None:
        try:
            return load_model_config(path, family), f"{path}/config.json"
        except ValueError as error:
            known = "" if Path(path).is_dir() else f"; shapes known without a folder: {', '.join(PUBLISHED)}"
            raise ConfigError(f"{error}{known}") from None
    return FAMILIES[shape["model_type"]].read(shape), f"as published; there is no folder {path}"


def cluster_of(gpu: str, gpus: int, gpus_per_node: int, host_memory: float = math.inf) -> Cluster:
    """The cluster of `gpus` GPUs of the kind `gpu`; `host_memory`: bytes of a node. Raises ConfigError for an unknown
    kind, and where the GPUs do not fill whole nodes."""
    if gpu not in GPUS:
        raise ConfigError(f"--gpu: {gpu!r} is unknown; give one of {', '.join(GPUS)}")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ConfigError(f"--gpus: {gpus} do not fill nodes of {gpus_per_node} (--gpus-per-node)")
    return Cluster(GPUS[gpu], gpus, min(gpus, gpus_per_node), host_memory)


def plan_of(config: Config, cluster: Cluster, response_tokens: int | None = None) -> Plan:
    """Raises ConfigError where no plan can be made."""
    spec, _ = model_spec(config)
    work = workload(config, spec, response_tokens)
    check_ranks(config, spec, cluster.gpus)
    return make_plan(config, spec, cluster, work)


def plan(
    files: Sequence[str],
    overrides: Sequence[str],
    *,
    gpu: str,
    gpus: int,
    gpus_per_node: int,
    host_memory: int | None,
    response_tokens: int | None,
    search: bool,
) -> int:
    """Prints the plan, or with `search` the ranked layouts. `host_memory`: GiB of a node; None: not limited. Returns 0
    where the run (or one of the layouts) works, else 1. Raises ConfigError."""
    config, _ = compose(files, overrides, UNNEEDED)
    memory = math.inf if host_memory is None else host_memory * GIB
    cluster, (spec, origin) = cluster_of(gpu, gpus, gpus_per_node, memory), model_spec(config)
    if search:
        plans = ranked(config, spec, cluster, workload(config, spec, response_tokens))
        print(search_table(plans, spec, cluster, origin))
    else:
        plans = [plan_of(config, cluster, response_tokens)]
        print(describe(plans[0], origin))
    return 0 if plans and plans[0].fault is None else 1
