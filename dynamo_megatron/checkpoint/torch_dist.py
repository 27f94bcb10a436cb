"""Reads and writes Megatron's distributed checkpoint files (`torch_dist`) a tensor at a time, without ranks or a GPU.

The format is that of torch.distributed.checkpoint: `*.distcp` files have the tensors in chunks of any shape, and
`.metadata` lists the chunks and their places. Megatron adds `metadata.json` and `common.pt`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from dynamo_megatron.checkpoint.folder import ChecksumWriter
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import error_line

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
METADATA_FILE, COMMON_FILE = ".metadata", "common.pt"
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


class _Unpickler(pickle.Unpickler):
    """Makes objects of METADATA_CLASSES alone: any other pickle may name any function for Python to call."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}, which is no part of a checkpoint; nothing was run")
        return super().find_class(module, name)


def is_torch_dist(path: str | Path) -> bool:
    """Returns True where the folder has a checkpoint in this format."""
    return (Path(path) / METADATA_FILE).is_file()


class TorchDistReader:
    """The tensors of one checkpoint folder. No code that the folder's files name is run.

    Raises ValueError, one line naming the file, where a file is missing, truncated or malformed, or where `.metadata`
    names something else than METADATA_CLASSES.
    """

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
            raise InputError(f"{file}: cannot be read ({error_line(error, 200)})") from None
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
        """The region of tensor `key` at `offset` with shape `size`, on the CPU in the stored dtype.

        Raises ValueError where the chunks do not contain the whole region, or a file cannot be read.
        """
        whole, chunks = self.tensors[key], self.tensors[key].chunks
        try:
            if offset:  # of a parameter stacked over many layers, those of the region's layers
                first, end = offset[0], offset[0] + size[0]
                chunks = [c for c in chunks if c.offsets[0] < end and first < c.offsets[0] + c.sizes[0]]
            region = ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            items = create_read_items_for_chunk_list(key, replace(whole, chunks=chunks), [region])
            result = torch.empty(tuple(size), dtype=whole.properties.dtype)
            self._files.read_data(LoadPlan(items), _Into(result))
        except Exception as error:  # torch's, on damaged data
            raise InputError(f"{self.path}: tensor {key} cannot be read ({error_line(error, 200)})") from None
        self._check_whole(key, sum(math.prod(item.lengths) for item in items), size)
        return result

    def _check_whole(self, key: str, stored: int, size: Sequence[int]) -> None:
        if stored != math.prod(size):
            raise InputError(f"{self.path}: tensor {key}: {stored} of {math.prod(size)} values are stored")


class _Into:
    """What FileSystemReader needs of a load planner to read into one tensor."""

    def __init__(self, target: torch.Tensor):
        self._target = target

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return narrow_tensor_by_index(self._target, item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class TorchDistWriter:
    """Writes a checkpoint into the existing, empty folder `path`; the checkpoint is readable after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = ChecksumWriter(path / DATA_FILE)
        self._tensors: dict[str, Any] = {}
        self._results: list[WriteResult] = []

    def add(self, key: str, tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> None:
        """Stores `tensor` as the part at `offset` of the tensor `key`, whose whole shape is `shape`. All three have the
        same number of dimensions.

        Raises ValueError where another part of the tensor has another dtype, and OSError.
        """
        whole = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        whole = self._tensors.setdefault(key, whole)
        if whole.properties.dtype != tensor.dtype:
            raise InputError(f"tensor {key}: parts in {whole.properties.dtype} and {tensor.dtype}; give one dtype")
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

    def close(self) -> dict[str, str]:
        """Writes the metadata files. Returns the checksums of the data files, by name. Does not sync to disk. Raises
        OSError."""
        self._stream.close()
        write_common(self.path, {"content_metadata": {}})
        writer = FileSystemWriter(self.path, sync_files=False)
        writer.set_up_storage_writer(is_coordinator=True)
        writer.finish(Metadata(self._tensors), [self._results])
        return {DATA_FILE: self._stream.digest.hexdigest()}


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
