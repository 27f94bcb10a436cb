"""What this node and the model's folder must have before a run starts: free ports, room on the disk, a vocabulary."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_megatron.config import Config
from dynamo_megatron.data.templates import end_token_ids
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.rollout.retention import stored_step
from dynamo_megatron.rollout.servers.fleet import training_nodes
from dynamo_megatron.rollout.servers.server import listening_address
from dynamo_megatron.runtime.listening import check_port

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_ports(config: Config) -> None:
    """Raises InputError where `rollout.host` is no address or interface of this node, or where `rollout.port`,
    `reward.servers.port`, or a MASTER_PORT that is set, cannot be listened to here."""
    rollout, rewards = config.rollout, config.reward.servers
    here: list[tuple[str, int | None, int]] = []  # key, first port, ports
    if rollout.engine == "sglang" and rollout.placement == "colocated":
        here.append(("rollout.port", rollout.port, max(1, rollout.servers // training_nodes())))
    if rewards is not None and rollout.placement != "split":  # rank 0's node starts all of them
        here.append(("reward.servers.port", rewards.port, rewards.count))
    host = listening_address(rollout.host) if here else ""
    for key, first, count in here:
        for port in range(first, first + count) if first is not None else ():
            check_port(host, port, f"{key}: {{}}; free it, name another one, or leave it out")
    if "MASTER_PORT" in os.environ and "RANK" not in os.environ:  # a launcher's rank 0 may serve it already
        check_port("", int(os.environ["MASTER_PORT"]), "MASTER_PORT: {}; free it or set another one")


def check_room(config: Config, spec: ModelSpec, *, generates: bool = True) -> str:
    """What a run leaves on disk, and what is free. Raises InputError where the disk is too small.

    `keep_last` checkpoints and the one being written, the exports, the weights being sent, those of a step that ends in
    NaN or infinity, and rollouts at their longest: of one step, or of `rollout.keep_last` and the one that is being
    made, or without checkpoints of all steps. `generates`: not for sft. What an earlier start has left of checkpoints,
    exports and weights counts as room, since it will be replaced, and of rollouts where only some steps stay."""
    output, every, keep = Path(config.output_dir), config.checkpoint.every, config.rollout.keep_last
    elements, width = sum(map(math.prod, huggingface_shapes(spec).values())), _WIDTH[config.model.dtype]
    exports = {"final": 1, "best": 1, "never": 0, "every": -(-config.trainer.steps // (every or config.trainer.steps))}
    count, checkpoints = exports[config.checkpoint.export_hf], config.checkpoint.keep_last + 1
    steps = config.trainer.steps if every is None else 1 + (keep or 0)
    if not generates or config.rollout.engine == "recorded":
        steps = 0
    needed = {
        f"{checkpoints} checkpoints": checkpoints * elements * (width + 12),  # float32 weights and two moments
        f"{count} exported folder{'s' * (count != 1)}": count * elements * width,
        "the weights sent": elements * width,
        "the weights of a failed step": elements * width,
        f"the rollouts of {steps} step{'s' * (steps != 1)}": int(
            steps * stored_step(config.rollout_budget, config.rollout.max_new_tokens)
        ),
    }
    replaced = ["checkpoints", "hf*", "push", *(["rollouts"] if keep is not None or every is None else [])]
    there = sum(folder_size(folder) for name in replaced for folder in output.glob(name))
    stat = os.statvfs(existing_folder(output))
    free = stat.f_bavail * stat.f_frsize
    told = ", ".join(f"{what} {size_text(size)}" for what, size in needed.items() if size)
    if sum(needed.values()) > free + there:
        raise InputError(
            f"output_dir: {output} has {size_text(free)} free, the run needs {size_text(sum(needed.values()))} "
            f"({told}); free some, name a folder on another disk, or lower checkpoint.keep_last or rollout.keep_last"
        )
    return f"{size_text(free)} free for {told}"


_WIDTH = {"bfloat16": 2, "float32": 4}  # bytes


def folder_size(folder: Path) -> int:
    """Bytes of its files; one that another process removes meanwhile has none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def existing_folder(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


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
                "correct eos_token_id in generation_config.json"
            )
        if tokenizer.convert_ids_to_tokens(end) is None:
            raise InputError(
                f"model.path: the end token {end} of {path} (eos_token_id) is unknown to the tokenizer, whose ids end "
                f"at {highest}; it is another model's: copy the model's own tokenizer files there"
            )
