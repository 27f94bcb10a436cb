"""Reads and writes Megatron's distributed checkpoint files (`torch_dist`) a tensor at a time, without ranks or a GPU.

The format is that of torch.distributed.checkpoint: `*.distcp` files have the tensors in chunks of any shape, and
`.metadata` lists the chunks and their places. Megatron adds `metadata.json` and `common.pt`.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, EnumMeta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dynamo_megatron.checkpoint.folder import (
    MANIFEST_FILE,
    METADATA_FILE,
    check_model,
    instead_of,
    is_torch_dist,
    read_manifest,
)
from dynamo_megatron.checkpoint.safetensors_folder import check_tensors
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.mapping import (
    HF_EMBEDDING,
    HF_HEAD,
    LAYER,
    TRANSFORMER_ENGINE_NAMES,
    expert_number,
    huggingface_names,
    huggingface_shapes,
    layout_of,
    parameter_names,
    to_huggingface,
    to_megatron,
)
from dynamo_megatron.models.spec import ModelSpec
from dynamo_megatron.runtime.plain_text import error_line

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COMMON_FILE = "common.pt"
DATA_FILE = "__0_0.distcp"  # of a checkpoint that one process writes
_DCP = "torch.distributed.checkpoint"
METADATA_CLASSES = {
    f"{_DCP}.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},  # Megatron adds its plans
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}  # fmt: skip


def _member(kind: type, name: str) -> Enum:
    """The member of an enumeration, which Python 3.11.2 pickles as a call of getattr."""
    if not (isinstance(kind, EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"names an attribute {name}, which is no part of a checkpoint; nothing was run")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    """Makes objects of METADATA_CLASSES alone: any other pickle may name any function for Python to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a checkpoint; nothing was run")
        return super().find_class(module, name)


class TorchDistReader:
    """The tensors of one checkpoint folder. No code that the folder's files name is run. Raises ValueError, one line
    naming the file, where a file is missing, truncated or malformed, or where `.metadata` names something else than
    METADATA_CLASSES."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = FileSystemReader(self.path)
        file = self.path / METADATA_FILE
        if not is_torch_dist(self.path):
            raise InputError(f"{self.path}: no .metadata; not a checkpoint in Megatron's torch_dist format")
        try:
            with open(file, "rb") as stream:
                metadata = _Unpickler(stream).load()
            self._files.set_up_storage_reader(metadata, is_coordinator=True)
            stored = metadata.state_dict_metadata.items()
            self.tensors = {key: t for key, t in stored if isinstance(t, TensorStorageMetadata)}
            ends: dict[str, int] = {}
            for info in metadata.storage_data.values():
                name = str(info.relative_path)
                ends[name] = max(ends.get(name, 0), info.offset + info.length)
        except Exception as error:  # a damaged pickle raises anything
            raise InputError(f"{file}: cannot be read ({error_line(error, 200)}); {instead_of(self.path)}") from None
        for name, end in ends.items():
            file = self.path / name
            if Path(name).name != name or not file.is_file():
                raise InputError(f"{file}: no such file in the folder, though .metadata names it")
            if file.stat().st_size < end:
                raise InputError(f"{file}: truncated, {file.stat().st_size} bytes of {end}")

    @property
    def names(self) -> list[str]:
        return list(self.tensors)

    def stored(self, key: str) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) of a tensor."""
        return tuple(self.tensors[key].size), self.tensors[key].properties.dtype

    def parts(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, size) of the parts that tensor `key` is stored in. Raises ValueError where some are missing."""
        parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.tensors[key].chunks]
        self._check_whole(key, sum(math.prod(size) for _, size in parts), self.tensors[key].size)
        return parts

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The region of tensor `key` at `offset` with shape `size`, on the CPU in the stored dtype. Raises ValueError
        where the chunks do not contain the whole region, or a file cannot be read."""
        whole, chunks = self.tensors[key], self.tensors[key].chunks
        try:
            if offset:  # of a parameter stacked over many layers, those of the region's layers
                first, end = offset[0], offset[0] + size[0]
                chunks = [c for c in chunks if c.offsets[0] < end and first < c.offsets[0] + c.sizes[0]]
            region = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            items = create_read_items_for_chunk_list(key, replace(whole, chunks=chunks), [region])
            result = torch.empty(tuple(size), dtype=whole.properties.dtype)
            target = SimpleNamespace(  # what FileSystemReader needs of a load planner
                resolve_tensor=lambda item: narrow_tensor_by_index(result, item.dest_offsets, item.lengths),
                commit_tensor=lambda item, tensor: None,
            )
            self._files.read_data(LoadPlan(items), target)
        except Exception as error:  # torch's, on damaged data
            raise InputError(f"{self.path}: tensor {key} cannot be read ({error_line(error, 200)})") from None
        self._check_whole(key, sum(math.prod(item.lengths) for item in items), size)
        return result

    def _check_whole(self, key: str, stored: int, size: Sequence[int]) -> None:
        if stored != math.prod(size):
            raise InputError(f"{self.path}: tensor {key}: {stored} of {math.prod(size)} values are stored")


class TorchDistWriter:
    """Writes a checkpoint into the existing, empty folder `path`; the checkpoint is readable after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = open(path / DATA_FILE, "wb")  # noqa: SIM115 (closed by `close`)
        self._tensors: dict[str, Any] = {}
        self._results: list[WriteResult] = []

    def add(self, key: str, tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> None:
        """Stores `tensor` as the part at `offset` of the tensor `key`, whose whole shape is `shape`. All three have the
        same number of dimensions. Raises ValueError where another part of the tensor has another dtype, and OSError."""
        whole = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        whole = self._tensors.setdefault(key, whole)
        if whole.properties.dtype != tensor.dtype:
            raise InputError(
                f"tensor {key}: parts in {whole.properties.dtype} and {tensor.dtype}; save the model in one dtype first"
            )
        whole.chunks.append(ChunkStorageMetadata(torch.Size(offset), tensor.shape))
        if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch.save writes the whole storage
        self._write(MetadataIndex(key, offset), tensor)

    def add_object(self, key: str, value: Any) -> None:
        """Stores the plain data `value` under `key`."""
        self._tensors[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), value)

    def _write(self, index: MetadataIndex, value: Any) -> None:
        start = self._stream.tell()
        _save(value, self._stream)
        length = self._stream.tell() - start
        self._results.append(WriteResult(index, length, _StorageInfo(DATA_FILE, start, length)))

    def close(self) -> None:
        """Writes the metadata files. Does not sync to disk. Raises OSError."""
        self._stream.close()
        write_common(self.path, {"content_metadata": {}})
        writer = FileSystemWriter(self.path, sync_files=False)
        writer.set_up_storage_writer(is_coordinator=True)
        writer.finish(Metadata(self._tensors), [self._results])


def write_common(folder: Path, common: dict[str, Any]) -> None:
    """Writes the data of a checkpoint that is no tensor, and the name of the format. Raises OSError."""
    with open(folder / COMMON_FILE, "wb") as stream:
        _save(common, stream)
    (folder / "metadata.json").write_text(json.dumps(BACKENDS), encoding="utf-8")


def _save(value: Any, stream: BinaryIO) -> None:
    try:
        torch.save(value, stream)
    except RuntimeError as error:  # torch's error on a full disk
        raise OSError(f"{stream.name}: not written: {str(error).splitlines()[0]}") from None


# Both layer specs store a norm under the name that it has where TransformerEngine fuses it with the next linear layer.
FUSED_NORMS = {alone: fused for fused, alone in TRANSFORMER_ENGINE_NAMES.items()}
OPTIMIZER = "optimizer."  # the beginning of Megatron's keys of optimizer tensors
CRITIC = "critic."  # of the keys of PPO's critic, and before those of its optimizer


class MegatronFolder:
    """The Hugging Face tensors of a `torch_dist` checkpoint, whatever layout saved it. Used like SafetensorsFolder.
    Megatron stacks a parameter over the layers (and experts) into one tensor; rows beyond the vocabulary are padding.

    The tensors of a parameter are consecutive in `names`, and the parameter that was read last is kept. Raises
    ValueError (one line) where the folder is not such a checkpoint, is damaged, or has other tensors than the model.
    """

    def __init__(self, path: str | Path, spec: ModelSpec) -> None:
        self.path, self._spec = Path(path), spec
        self._reader = TorchDistReader(path)
        self._stored = dict(_stored_parameters(spec))
        self._parameter_of = {tensor: name for name in self._stored for tensor in huggingface_names(spec, name)}
        self._held: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self._check()

    @property
    def names(self) -> list[str]:
        return list(self._parameter_of)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.stored(self._stored[self._parameter_of[name]].key)[1]

    def get(self, name: str, prefix: str = "") -> torch.Tensor:
        """The whole tensor, on the CPU, in the stored dtype. `prefix`: of the keys of a state of the optimizer, such as
        "optimizer.state.exp_avg.". Raises ValueError where it cannot be read."""
        if self._spec.tied and name == HF_HEAD:
            name = HF_EMBEDDING
        parameter = self._parameter_of.get(name)
        if parameter is None:
            raise InputError(f"{self.path}: tensor {name} is missing")
        if self._held[0] != prefix + parameter:
            self._held = ("", {})  # frees the last parameter before the next is read
            self._held = (prefix + parameter, self._read(parameter, prefix))
        return self._held[1][name]

    def _read(self, parameter: str, prefix: str) -> dict[str, torch.Tensor]:
        where = self._stored[parameter]
        tensor = self._reader.read(prefix + where.key, where.offset(0), (*(1,) * len(where.sizes), *where.shape))
        return to_huggingface(self._spec, parameter, [tensor.view(where.shape)])

    def _check(self) -> None:
        if (self.path / MANIFEST_FILE).is_file():  # checkpoints of other programs have none
            check_model(self.path, self._spec.dimensions())
            if "lora" in read_manifest(self.path):
                raise InputError(
                    f"{self.path}: LoRA adapters without their base; `convert mcore2hf` writes the merged model"
                )
        expected = {where.key: where.whole for where in self._stored.values()}
        own = (key for key in self._reader.names if not key.startswith((OPTIMIZER, CRITIC)))
        found = {key: self._reader.stored(key)[0] for key in own}
        for name, where in self._stored.items():
            stored = found.get(where.key, ())
            if layout_of(name) == "vocab" and stored[1:] == where.shape[1:] and stored[0] > where.shape[0]:
                found[where.key] = where.whole  # the rest is padding
        check_tensors(self.path, self._spec, expected, found)


@dataclass(frozen=True)
class _Stored:
    """The place of a parameter of this `shape`: entry `index` of the tensor `key`, whose leading dimensions have
    `sizes`."""

    key: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.sizes, *self.shape)

    def offset(self, row: int) -> tuple[int, ...]:
        return (*self.index, row, *(0,) * (len(self.shape) - 1))


def _stored_parameters(spec: ModelSpec) -> Iterator[tuple[str, _Stored]]:
    """(parameter, its place) for the whole model, in Megatron's shapes without padding."""
    shapes = huggingface_shapes(spec)
    for name in parameter_names(spec):
        parts = [shapes[part] for part in huggingface_names(spec, name)]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        key, index, sizes = name, (), ()
        if layer := LAYER.fullmatch(name):
            within, index, sizes = layer[2], (int(layer[1]),), (spec.num_layers,)
            expert = expert_number(name)
            if expert is not None:
                index, sizes = (*index, expert), (*sizes, spec.num_experts)
                within = within.replace(f"local_experts.{expert}", "experts")
            elif not (spec.num_experts and within == "pre_mlp_layernorm.weight"):
                within = FUSED_NORMS.get(within, within)
            key = f"decoder.layers.{within}"
        yield name, _Stored(key, index, sizes, shape)


def write_megatron(spec: ModelSpec, get: Callable[[str], torch.Tensor], path: Path) -> None:
    """Writes a model into the empty folder `path`, one parameter at a time. `get` returns its Hugging Face tensors by
    name. Raises OSError, and ValueError where a parameter's tensors differ in dtype."""
    writer = TorchDistWriter(path)
    stateful: dict[str, tuple[int, ...]] = {}
    for name, where in _stored_parameters(spec):
        names = huggingface_names(spec, name)
        row, layout = 0, layout_of(name)
        # gate and up are written separately, as Megatron stores them: this needs less memory
        for together in [(n,) for n in names] if layout == "gate_up" else [names]:
            tensors = [get(n) for n in together]
            if len({t.dtype for t in tensors}) > 1:
                raise InputError(
                    f"tensors {', '.join(together)}: of different dtypes; save the model in one dtype first"
                )
            tensor = to_megatron(spec, name, tensors, 0, 1) if layout == "qkv" else tensors[0]
            del tensors
            writer.add(where.key, tensor.view(*(1,) * len(where.sizes), *tensor.shape), where.whole, where.offset(row))
            row += len(tensor)
        if re.search(r"(\.linear_\w+|layernorm)\.weight$", where.key):
            stateful[where.key.removesuffix("weight")] = where.sizes or (1,)
    # Megatron's own loader requires an extra state of every linear layer and, with TransformerEngine, of every norm
    # that is a separate module; there is none, so an empty one is written.
    for key, sizes in stateful.items():
        for index in product(*map(range, sizes)):
            shard = f"shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
            writer.add_object(f"{key}_extra_state/{shard}", [None])
    writer.close()
