"""Loads a model's weights from a folder, Hugging Face's or Megatron's, into the policy on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from dynamo_megatron.checkpoint.folder import UNVERIFIED, verify
from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.checkpoint.torch_dist import MegatronFolder, is_torch_dist
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import (
    expert_number,
    global_name,
    huggingface_names,
    huggingface_shapes,
    is_finite,
    to_megatron,
)
from dynamo_megatron.models.spec import ModelSpec

T = TypeVar("T")


def load_folder(chunks: Sequence[torch.nn.Module], spec: ModelSpec, path: str, layout: Any) -> None:
    """Loads the weights of a Hugging Face or Megatron folder into a policy's chunks; collective over all ranks of its
    `layout` (policy/layout.py; the policy calls this, so that it is not imported here). Raises ValueError, the same on
    every rank, also where only one rank reads the faulty tensor."""
    if spec.bridged is not None:
        (model,) = chunks
        done = _on_every_rank(layout, lambda: load_bridged(model, SafetensorsFolder(path, spec).get))
        if left := huggingface_shapes(spec).keys() - set().union(*layout.gather(done)):
            predicting = ("mtp.", f"model.layers.{spec.num_layers}.")
            why = "; leave those of multi-token prediction out of the folder"
            raise InputError(
                f"{path}: {len(left)} tensors have no place in Bridge's model, the first: {min(left)}"
                + why * any(name.startswith(predicting) for name in left)
            )
        return
    if is_torch_dist(path) and not verify_bytes(Path(path), layout) and layout.rank == 0:
        print(f"{path}: {UNVERIFIED}", flush=True)
    tp = {"tp_rank": layout.tp.rank(), "tp_size": layout.tp.size()}
    ep = {"ep_rank": layout.ep.rank(), "ep_size": layout.ep.size()}

    def load() -> None:
        folder = open_weights(path, spec)
        for chunk in chunks:
            load_weights(chunk, spec, folder, layer_offset=chunk.layer_offset, **tp, **ep)

    _on_every_rank(layout, load)


def verify_bytes(folder: Path, layout: Any) -> bool:
    """Runs `verify` with a share of the files on each rank; collective over all ranks. Returns False where there are no
    checksums. Raises ValueError, the same on every rank, naming the file and what to do."""
    return _on_every_rank(layout, lambda: verify(folder, layout.rank, layout.world_size))


def _on_every_rank(layout: Any, call: Callable[[], T]) -> T:
    """What `call` returns. Collective; raises a ValueError of any rank on all of them."""
    result, failed = None, None
    try:
        result = call()
    except ValueError as error:
        failed = str(error)
    if found := [why for why in layout.gather(failed) if why is not None]:
        raise InputError(found[0])
    return result


@torch.no_grad()
def load_weights(
    model: torch.nn.Module,
    spec: ModelSpec,
    folder: SafetensorsFolder,
    *,
    layer_offset: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> None:
    """Fills the parameters of a GPTModel, a chunk of the policy whose first layer is the model's layer `layer_offset`,
    in their dtype and on their device. Raises ValueError naming a parameter that is unknown to the family or has
    another shape than its shard, a tensor that does not have one parameter (in the chunk's layers, and of this rank's
    experts), or one whose values are not all finite in the parameter's dtype."""
    experts = spec.experts_of(ep_rank, ep_size)
    used: Counter[str] = Counter()
    for local_name, parameter in model.named_parameters():
        name = global_name(local_name, layer_offset, experts.start)
        names = huggingface_names(spec, name)
        used.update(names)
        shard = to_megatron(spec, name, [folder.get(tensor) for tensor in names], tp_rank, tp_size)
        if shard.shape != parameter.shape:
            raise InputError(
                f"{name}: {list(parameter.shape)} in the model, {list(shard.shape)} on rank {tp_rank} of tp {tp_size}"
            )
        parameter.copy_(shard)
        if not is_finite(parameter):
            damaged = next((tensor for tensor in names if not is_finite(folder.get(tensor))), None)
            dtype = str(parameter.dtype).removeprefix("torch.")
            why = "holds NaN or infinity" if damaged else f"has a value too large for {dtype}"
            raise InputError(f"{folder.path}: tensor {damaged or names[0]} {why}; download or convert the model again")
    own = [parts for name, parts in spec.layer_names.items() if expert_number(name) in (None, *experts)]
    for layer in {tensor.split(".")[2] for tensor in used if tensor.startswith("model.layers.")}:
        used.update(f"model.layers.{layer}.{part}" for parts in own for part in parts)
    if wrong := [name for name, times in used.items() if times != (2 if name.startswith("model.layers.") else 1)]:
        raise InputError(f"{folder.path}: tensor {wrong[0]} does not have one parameter in the model")


@torch.no_grad()
def load_bridged(model: torch.nn.Module, read: Callable[[str], torch.Tensor]) -> set[str]:
    """Loads a folder's tensors into this rank's stage of a Bridge model (bridge/source.py), whose parameters are NaN
    before. What is loaded is converted back, and has to equal the folder's tensors bit by bit. Returns their names.
    `read` gives a tensor by its name, in any dtype. A collective over tensor-parallel ranks, of which the first
    compares. Raises InputError naming the parameter or the tensor."""
    wrong, done = [], set()
    for name, unit in model.units.items():
        tensors = {tensor: read(tensor) for tensor in unit.names}
        for (_, _, parameter), value in zip(unit.parts, model.convert(name, tensors), strict=True):
            if value.shape != parameter.shape:
                raise InputError(f"{name}: {list(parameter.shape)} in the model, {list(value.shape)} from the folder")
            parameter.copy_(value)
        back = model.export(name)
        done |= back.keys()
        if model.pg_collection.tp.rank() == 0:  # raised below: the others wait in `export`
            wrong += [n for n, stored in tensors.items() if not torch.equal(back[n].cpu(), stored.to(back[n].dtype))]
    if wrong:
        raise InputError(f"tensor {wrong[0]}: what Bridge writes back is not what it read, or it holds NaN")
    if left := [name for name, parameter in model.named_parameters() if not is_finite(parameter)]:
        raise InputError(f"parameter {left[0]} was not loaded, or has infinite values")
    return done


def open_weights(path: str | Path, spec: ModelSpec) -> SafetensorsFolder | MegatronFolder:
    """Opens the weights in a model's folder, safetensors or a Megatron checkpoint, and checks every name and shape.
    Raises ValueError (one line)."""
    return MegatronFolder(path, spec) if is_torch_dist(path) else SafetensorsFolder(path, spec)


def model_digest(path: str | Path, spec: ModelSpec, layout: Any = None) -> str:
    """A checksum (XXH3, 32 hex digits) of a model's tensors, whatever files they are in. With a `layout` it is
    collective over its ranks, each of which reads a share. Raises ValueError, the same on every rank."""
    names = list(huggingface_shapes(spec))
    rank, ranks = (0, 1) if layout is None else (layout.rank, layout.world_size)
    own = names[len(names) * rank // ranks : len(names) * (rank + 1) // ranks]

    def read() -> list[str]:
        folder = open_weights(path, spec)
        return [_digest_line(name, folder.get(name)) for name in own]

    shares = [read()] if layout is None else layout.gather(_on_every_rank(layout, read))
    return xxhash.xxh3_128_hexdigest("\n".join(line for share in shares for line in share).encode())


def _digest_line(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {tensor.dtype} {xxhash.xxh3_128_hexdigest(tensor.contiguous().flatten().view(torch.uint8).numpy())}"
