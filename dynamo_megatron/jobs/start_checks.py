"""What is checked before a run starts: model, layout and ranks; data; ports and disk of this node; the vocabulary."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.checkpoint.folder import is_torch_dist
from dynamo_megatron.config import Config, shipped
from dynamo_megatron.data.sources import DATASETS
from dynamo_megatron.data.templates import end_token_ids
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.adapters import adapter_elements, check_lora
from dynamo_megatron.models.fp8 import check_fp8_shapes
from dynamo_megatron.models.mapping import ROUTER_BIAS, huggingface_shapes
from dynamo_megatron.rollout.servers.fleet import training_nodes
from dynamo_megatron.rollout.servers.server import cuda_available, gpu_count, listening_address
from dynamo_megatron.runtime.listening import check_port
from dynamo_megatron.runtime.run_folder import has_results
from dynamo_megatron.weight_sync.transports import check_transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_ON_A_CORE = 8  # ranks of servers, where there are no GPUs


def check_layout(config: Config, world_size: int) -> ModelSpec:
    """Raises InputError where model, layout and the number of ranks do not fit."""
    spec = load_model_config(config.model.path, config.model.family, config.model.source)
    for key, folder in config.other_models.items():
        check_reference(spec, folder, key)
    check_ranks(config, spec, world_size, gpus=cuda_available())
    return spec


def check_data(config: Config) -> None:
    """Raises InputError where a file of problems that a training would read is not there."""
    sources = {"data.source": config.data.source, "eval.data": config.eval.data if config.eval.every else None}
    for key, source in sources.items():
        is_file = source and not source.startswith(DATASETS) and source.endswith((".jsonl", ".parquet"))
        if is_file and not shipped.problems(source).is_file():
            raise InputError(f"{key}: there is no file {source}")


def check_ranks(config: Config, spec: ModelSpec, world_size: int, *, gpus: bool = True) -> None:
    """Raises InputError where the layout does not fit the model or the number of ranks. `gpus`: it is for a machine
    that has some."""
    p = config.parallel
    if misfit := p.misfit(world_size):
        raise InputError(misfit)
    spec.check_parallel(p)
    if config.model.lora is not None:
        check_lora(config.model.lora, spec)
    has_biases = spec.num_experts and any(name.endswith(ROUTER_BIAS) for name in huggingface_shapes(spec))
    if config.model.expert_bias_update_rate and not has_biases:
        raise InputError(
            f"model.expert_bias_update_rate: a {spec.family} model has no {ROUTER_BIAS}, as DeepSeek-V3 and GLM-4-MoE "
            "have, in which servers and exports could take the biases; leave it out"
        )
    if config.rollout.quantization is not None:
        check_fp8_shapes(spec, config.rollout.tp)
    if config.rollout.max_staleness and config.rollout.placement == "colocated" and gpus:
        raise InputError(
            f"rollout.max_staleness: {config.rollout.max_staleness} has servers generate while the ranks train, and "
            "colocated ones have the same GPUs; set rollout.placement to split, or max_staleness to 0"
        )
    if spec.num_experts and p.tp > 1 and not p.sequence_parallel:
        raise InputError(
            "parallel.sequence_parallel: a mixture of experts under tensor parallelism needs it; set it to true"
        )


def check_reference(spec: ModelSpec, folder: str, key: str) -> None:
    """Raises InputError where the model that `key` names is none, or not of the policy's shape."""
    try:
        if is_torch_dist(folder):  # a run's checkpoint, or a converted model
            from dynamo_megatron.checkpoint.weights import open_weights

            open_weights(folder, spec)
            return
        reference = load_model_config(folder).dimensions()
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
    for name, own in spec.dimensions().items():
        if reference[name] != own and name != "max_positions":
            raise InputError(
                f"{key}: {folder} has {name} {reference[name]}, the policy {own}; "
                "it must be a model of the policy's shape"
            )


def describe_layout(config: Config, spec: ModelSpec, ranks: int) -> dict[str, Any]:
    """The derived values that every job shows."""
    p = config.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "dp": ranks // p.model_ranks}
    extra = {"chunks a stage": p.vpp, "layers in the last stage": p.last_stage_layers or 0, "expert-parallel": p.ep}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "cp")
    layout += "".join(f", {name} {size}" for name, size in extra.items() if size > 1)
    experts = ""
    if spec.num_experts:
        experts = f", {spec.num_experts} experts, {spec.router_topk} a token, routers without auxiliary loss"
    return {
        "layout": f"{ranks} ranks = {layout}{', sequence-parallel' if p.cuts_sequences else ''}",
        "device": "CUDA" if cuda_available() else "CPU",
        "model": f"{spec.family}, {spec.num_layers} layers, vocabulary {spec.vocab_size} "
        f"(padded to {spec.padded_vocab(p.tp)}), {'tied' if spec.tied else 'untied'} head{experts}",
    }


def on_this_machine(config: Config, ranks: int) -> Config:
    """With what follows from its GPUs, if it has any; `ranks`: of all nodes of the run."""
    return config.with_servers(ranks, training_nodes()) if cuda_available() else config


def default_ranks(config: Config) -> int:
    return gpu_count() or math.lcm(config.parallel.model_ranks, config.parallel.pp * config.parallel.ep)


def check_node(config: Config, ranks_of_run: int, nodes: int) -> str:
    """Returns the name of the transport of weights. Raises InputError where this node has no room for its share of the
    colocated servers or no `rollout.python` for them, where `rollout.host` is no address or interface here, where
    `rollout.port`, or a MASTER_PORT that is set, cannot be listened to, or where the transport cannot work."""
    rollout, trained = config.rollout, ranks_of_run // nodes
    ranks, gpus = -(-rollout.servers // nodes) * rollout.tp, gpu_count()
    if rollout.engine == "sglang" and rollout.placement == "colocated":
        if ranks > (gpus or MOST_ON_A_CORE * os.cpu_count()):
            raise InputError(
                f"rollout.servers: {rollout.servers} servers of {rollout.tp} ranks (rollout.tp) have {ranks} on this "
                f"machine, which has {f'{gpus} GPUs' if gpus else f'{os.cpu_count()} cores'}; ask for fewer"
            )
        if rollout.python is not None and shutil.which(rollout.python) is None:
            raise InputError(
                f"rollout.python: there is no program {rollout.python} here; name the python of an environment with "
                "SGLang"
            )
        host, servers = listening_address(rollout.host), max(1, rollout.servers // nodes)
        for port in range(rollout.port, rollout.port + servers) if rollout.port is not None else ():
            check_port(host, port, "rollout.port")
    if "MASTER_PORT" in os.environ and "RANK" not in os.environ:  # a launcher's rank 0 may serve it already
        check_port("", int(os.environ["MASTER_PORT"]), "MASTER_PORT")
    transport = check_transport(rollout)
    if transport == "ipc" and rollout.engine == "sglang" and ranks > trained:
        raise InputError(
            f"rollout.servers: {rollout.servers} servers of {rollout.tp} ranks (rollout.tp) have {ranks} GPUs on this "
            f"machine, which has {trained} training ranks, and by ipc weights come from a rank on the same GPU; lower "
            "rollout.servers or rollout.tp, start more ranks, or set rollout.sync.transport to gloo"
        )
    return transport


def check_room(config: Config, spec: ModelSpec) -> str:
    """What a run leaves on disk, and what is free. Raises InputError where the disk is too small.

    Counted are the checkpoints that will be written, at most `keep_last` and one more, the exports, the weights that
    are sent and those of a step that fails. A run that goes on has written a part of it, and is not refused."""
    output, width = Path(config.output_dir), {"bfloat16": 2, "float32": 4}[config.model.dtype]
    elements = sum(map(math.prod, huggingface_shapes(spec).values()))
    saves = -(-config.trainer.steps // every) if (every := config.checkpoint.every) else 0  # a stop saves one more
    export = config.checkpoint.export_hf
    checkpoints = config.checkpoint.keep_last + 1 if export == "best" else min(config.checkpoint.keep_last + 1, saves)
    exports = {"every": saves, "never": 0}.get(export, 1)
    lora = config.model.lora
    saved = elements if lora is None else spec.num_layers * adapter_elements(spec, lora)
    with_optimizer = config.trained_models * saved * (width + 12)  # float32 weights and two moments
    needed = {
        f"{checkpoints} checkpoint{'s' * (checkpoints > 1)}": checkpoints * with_optimizer,
        "exported folders": exports * elements * width,
        "the weights sent and those of a failed step": 2 * elements * width,
    }
    stat = os.statvfs(existing_folder(output))
    free = stat.f_bavail * stat.f_frsize
    told = ", ".join(f"{what} {size_text(size)}" for what, size in needed.items() if size)
    if sum(needed.values()) > free and not has_results(output):
        raise InputError(
            f"output_dir: {output} has {size_text(free)} free, the run needs {size_text(sum(needed.values()))} "
            f"({told}); free some, name a folder on another disk, or lower checkpoint.keep_last"
        )
    stop = "" if checkpoints else f"; a stop saves a checkpoint, {size_text(with_optimizer)} more"
    return f"{size_text(free)} free for {told}{stop}"


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def size_text(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def check_vocabulary(path: str | os.PathLike, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises InputError where a token id or an end token is beyond the embedding, or where the tokenizer does not know
    an end token, which also detects another model's smaller tokenizer, whose ids all fit. Tokens that transformers 5
    itself adds to a Qwen2 tokenizer, and that the folder's files do not name, may be beyond the embedding."""
    added = tokenizer.get_added_vocab()
    named = "".join(file.read_text(encoding="utf-8") for file in Path(path).glob("*token*.json"))
    highest = max(id for token, id in tokenizer.get_vocab().items() if token not in added or token in named)
    if highest >= spec.vocab_size:
        raise InputError(
            f"model.path: the tokenizer in {path} has ids up to {highest}, the embedding {spec.vocab_size} rows "
            "(config.json's vocab_size); it is another model's tokenizer: copy the model's own tokenizer files there"
        )
    for end in end_token_ids(path, tokenizer):
        if end >= spec.vocab_size:
            raise InputError(
                f"model.path: the end token {end} of {path} is beyond the embedding's {spec.vocab_size} rows; "
                "correct eos_token_id in generation_config.json or config.json"
            )
        if tokenizer.convert_ids_to_tokens(end) is None:
            raise InputError(
                f"model.path: the end token {end} of {path} (eos_token_id) is unknown to the tokenizer, whose ids end "
                f"at {highest}; it is another model's: copy the model's own tokenizer files there"
            )
