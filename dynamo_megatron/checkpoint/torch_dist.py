"""Reads and writes Megatron's distributed checkpoint files (`torch_dist`) a tensor at a time, without ranks or a GPU.

The format is that of torch.distributed.checkpoint. `*.distcp` files have the tensors in chunks, and `.metadata` lists
the chunks and their places; Megatron adds `metadata.json` and `common.pt`. A tensor may be divided into chunks in any
way. To read a region, the chunks that overlap it are read.

Megatron 0.19 itself writes no `common.pt` any more (`checked_loading.py`), but loads checkpoints that have it, as 0.16
does. Files that are written here, and in a run, are the same under every version.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from dynamo_megatron.checkpoint.checksums import ChecksumWriter
from dynamo_megatron.checkpoint.torch_dist_metadata import METADATA_FILE, read_metadata
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.plain_text import error_line

BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
COMMON_FILE = "common.pt"
FILE_BYTES = 4 << 30  # a .distcp file is closed once it holds this much
# The exceptions of torch.load on corrupt data.
DAMAGED = (
    EOFError, OSError, MemoryError, RuntimeError,
    ValueError, TypeError, LookupError, AttributeError, OverflowError, AssertionError,
)  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


def is_torch_dist(path: str | Path) -> bool:
    """Returns True where the folder has a checkpoint in this format."""
    return (Path(path) / METADATA_FILE).is_file()


class TorchDistReader:
    """The tensors of one checkpoint folder. `tensors` has their shapes and dtypes by key, and `read` reads them.
    Nothing that the folder's files name is imported or called, so the files may be untrusted.

    Raises ValueError (one line that names the file) where there is no such checkpoint, where one of its files is
    missing, truncated or malformed, and where a file names a class that tensors and plain data do not need.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_torch_dist(self.path):
            raise InputError(f"{self.path}: no .metadata; not a checkpoint in Megatron's torch_dist format")
        self.metadata = read_metadata(self.path)
        stored = self.metadata.state_dict_metadata
        stored = {key: t for key, t in stored.items() if isinstance(t, TensorStorageMetadata)}
        self.tensors = {key: StoredTensor(tuple(t.size), t.properties.dtype) for key, t in stored.items()}
        self._chunks = {key: _Chunks(t.chunks) for key, t in stored.items()}
        self._sizes = {MetadataIndex(key, c.offsets): c.sizes for key, t in stored.items() for c in t.chunks}
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            if not file.is_file():
                raise InputError(f"{file}: no such file, though .metadata names it")
            if file.stat().st_size < end:
                raise InputError(f"{file}: truncated, {file.stat().st_size} bytes of {end}")

    def parts(self, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, size) of the parts that tensor `key` is stored in. Raises ValueError where some are missing."""
        parts = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._chunks[key].all]
        values, whole = sum(math.prod(size) for _, size in parts), math.prod(self.tensors[key].shape)
        if values != whole:
            raise InputError(f"{self.path}: tensor {key}: {values} of its {whole} values are stored")
        return parts

    def read(self, key: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        """The region of tensor `key` at `offset` with shape `size`, on the CPU in the stored dtype.

        Raises ValueError where the chunks do not contain the whole region, or a file cannot be read.
        """
        result, filled = None, 0
        for chunk in self._chunks[key].near(offset, size):
            start = [max(a, b) for a, b in zip(chunk.offsets, offset, strict=True)]
            ends = zip(chunk.offsets, chunk.sizes, offset, size, strict=True)
            shape = [min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True)]
            if min(shape, default=1) <= 0:
                continue
            tensor = self.part(MetadataIndex(key, chunk.offsets))
            tensor = narrow_tensor_by_index(tensor, [s - a for s, a in zip(start, chunk.offsets, strict=True)], shape)
            filled += tensor.numel()
            if shape == list(size):
                result = tensor
                break
            if result is None:
                result = torch.empty(tuple(size), dtype=self.tensors[key].dtype)
            narrow_tensor_by_index(result, [s - b for s, b in zip(start, offset, strict=True)], shape).copy_(tensor)
        if result is None or filled != math.prod(size):
            raise InputError(
                f"{self.path}: tensor {key}: {filled} of the {math.prod(size)} values at {list(offset)} are stored"
            )
        return result

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part of a tensor that is stored under `index`. Raises ValueError where it cannot be read, or its shape or
        dtype differs from that in .metadata."""
        dtype, sizes = self.tensors[index.fqn].dtype, self._sizes[index]
        tensor = self.stored(index)
        # A view with more values than its memory has (stride 0) would grow when it is copied.
        if (
            type(tensor) is not torch.Tensor
            or (tensor.dtype, tuple(tensor.shape), tensor.layout) != (dtype, tuple(sizes), torch.strided)
            or tensor.untyped_storage().nbytes() < tensor.nbytes
        ):
            found = f"{tensor.dtype} {list(tensor.shape)}" if torch.is_tensor(tensor) else type(tensor).__name__
            file = self.path / self.metadata.storage_data[index].relative_path
            raise InputError(f"{file}: tensor {index.fqn} cannot be read ({found}, {dtype} {list(sizes)} in .metadata)")
        return tensor

    def stored(self, index: MetadataIndex) -> Any:
        """The tensor or the plain data that is stored under `index`. Raises ValueError where it cannot be read."""
        info = self.metadata.storage_data[index]
        file = self.path / info.relative_path
        try:
            with open(file, "rb") as stream:
                return load_plain(_create_file_view(stream, info.offset, info.length))
        except DAMAGED as error:
            raise InputError(f"{file}: {index.fqn} cannot be read ({error_line(error, 200)})") from None


def load_plain(stream: BinaryIO) -> Any:
    """Loads tensors and plain data that torch.save wrote.

    Raises ValueError, naming the class or function, for a file that names anything else; exceptions of DAMAGED for
    corrupt data."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text advises to load the file nevertheless
        if (named := re.search(r"GLOBAL (\S+)", str(error))) is None:
            why = str(error).split("WeightsUnpickler error:")[-1].strip().partition("\n")[0]
            raise InputError(f"not what torch.save writes: {why}") from None
        raise InputError(
            f"names {named[1]}, which tensors and plain data do not need; nothing of it was run or loaded"
        ) from None


class _Chunks:
    """The chunks of one tensor, indexed by their offsets in the leading dimensions in which every chunk has size 1: the
    layers and the experts that a parameter is stacked over."""

    def __init__(self, chunks: list[ChunkStorageMetadata]) -> None:
        self.all = chunks
        longest = min((len(chunk.sizes) for chunk in chunks), default=0)
        self._leading = next((d for d in range(longest) if any(c.sizes[d] != 1 for c in chunks)), longest)
        self._at: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
        for chunk in chunks:
            self._at.setdefault(tuple(chunk.offsets[: self._leading]), []).append(chunk)

    def near(self, offset: Sequence[int], size: Sequence[int]) -> list[ChunkStorageMetadata]:
        """The chunks that may overlap a region."""
        region = list(zip(offset, size, strict=True))[: self._leading]
        if math.prod(n for _, n in region) > len(self._at):
            return self.all
        return [c for place in product(*(range(a, a + n) for a, n in region)) for c in self._at.get(place, ())]


class TorchDistWriter:
    """Writes a checkpoint into the existing, empty folder `path`; the checkpoint is readable after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Any] = {}
        self._results: list[WriteResult] = []
        self._digests: dict[str, xxhash.xxh3_128] = {}  # by file
        self._full = 0  # number of files that have reached FILE_BYTES

    def add(self, key: str, tensor: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> None:
        """Stores `tensor` as the part at `offset` of the tensor `key`, whose whole shape is `shape`. All three have the
        same number of dimensions.

        Raises ValueError where another part of the tensor has another dtype, and OSError.
        """
        whole = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        whole = self._tensors.setdefault(key, whole)
        assert whole.size == torch.Size(shape), f"{key}: {whole.size}, {shape}"
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
        file = self.path / f"__{self._full}_0.distcp"
        digest = self._digests.setdefault(file.name, xxhash.xxh3_128())
        with ChecksumWriter(file, "ab", digest) as stream:
            start = stream.tell()
            _save(value, stream)
            end = stream.tell()
        self._results.append(WriteResult(index, end - start, _StorageInfo(file.name, start, end - start)))
        self._full += end >= FILE_BYTES

    def close(self) -> dict[str, str]:
        """Writes the metadata files. Returns the checksums of the data files, by name. Does not sync to disk. Raises
        OSError."""
        write_common(self.path, {"content_metadata": {}})
        writer = FileSystemWriter(self.path, sync_files=False)
        writer.set_up_storage_writer(is_coordinator=True)
        writer.finish(Metadata(self._tensors), [self._results])
        return {name: digest.hexdigest() for name, digest in self._digests.items()}


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
