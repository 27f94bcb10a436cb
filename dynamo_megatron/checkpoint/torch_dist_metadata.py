"""Reads `.metadata` of a torch_dist folder, which is a pickle, without running anything that the pickle names.

A pickle may name any function for Python to call. The unpickler here knows only the few instructions that torch's
writer uses and the few classes in LISTED, and builds inert records from them. The needed values of these records are
checked one by one, and torch's own objects are built from them. The rest of the file is ignored.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import error_line, on_one_line

METADATA_FILE = ".metadata"
LARGEST = 1 << 30  # bytes; a part of a tensor takes about 140, so 7 million parts fit
MOST_DIMENSIONS = 16
_OF_TORCH = "torch.distributed.checkpoint"
LISTED = {
    f"{_OF_TORCH}.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    },
    f"{_OF_TORCH}.filesystem": {"_StorageInfo"},
    f"{_OF_TORCH}.planner": {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"},  # Megatron adds its plans
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}  # fmt: skip
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}  # "torch.float32": ...
INSTRUCTIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT,
    pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1,
    pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
)  # fmt: skip


class MetadataError(InputError):
    """A fault of the file. The message does not name the file."""


class _Record:
    """Takes the place of an object of a listed class: has its constructor's arguments and its state, unchecked."""

    __slots__ = ("arguments", "state")
    name = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


RECORDS = {
    (module, name): type(name, (_Record,), {"__slots__": (), "name": name})
    for module, names in LISTED.items()
    for name in names
}


class _Instructions(dict):
    def __missing__(self, code: int) -> NoReturn:
        raise MetadataError(f"has the pickle instruction {chr(code)!r}, which no checkpoint's metadata needs")


class _Unpickler(pickle._Unpickler):  # written in Python: that in C has instructions that take unlimited memory
    dispatch = _Instructions({code[0]: pickle._Unpickler.dispatch[code[0]] for code in INSTRUCTIONS})

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(self.stack[-1], key, value)

    @staticmethod
    def _set(target: Any, key: Any, value: Any) -> None:
        # Hashing any other key may take unlimited time, or recurse until the interpreter crashes.
        if type(target) is not dict or not isinstance(key, str | int | _Record):
            raise MetadataError(f"an entry of {type(target).__name__} under {type(key).__name__}")
        target[key] = value

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems

    def find_class(self, module: str, name: str) -> Any:
        if (record := RECORDS.get((module, name))) is not None:
            return record
        if module == "torch" and (dtype := DTYPES.get(f"torch.{name}")) is not None:
            return dtype
        raise MetadataError(
            f"names {module}.{name}, which is no part of a checkpoint's metadata; nothing of it was run or loaded"
        )


def read_metadata(folder: Path) -> Metadata:
    """The parts of the tensors of a torch_dist folder and their places, as torch's readers need them. Checks that the
    parts are in files directly in the folder, that no part needs more bytes than are stored of it, and that no part
    occurs twice.

    Raises ValueError (one line with the file's name) where the file is missing or malformed, or names a class that is
    not in LISTED."""
    file = folder / METADATA_FILE
    content = plain_json.read_bytes(file, LARGEST)
    try:
        return _metadata(_Unpickler(io.BytesIO(content)).load())
    except MetadataError as error:
        raise InputError(f"{file}: {on_one_line(str(error), 300)}") from None
    except DAMAGED as error:
        raise InputError(f"{file}: not readable ({error_line(error, 200)})") from None


# The exceptions of the unpickler on corrupt data: it assumes that the instructions are consistent.
DAMAGED = (
    pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError, ValueError, OverflowError, MemoryError,
    RecursionError,
)  # fmt: skip


def _metadata(read: Any) -> Metadata:
    state = _state(read, "Metadata")
    where = {}
    for key, value in _is(state.get("storage_data"), dict, "storage_data").items():
        index, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        offset = None if index.get("offset") is None else _size(index["offset"], "offset")
        name, start, length = (info.get(field) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise MetadataError(f"the file {str(name)!r:.80} is not in the folder")
        _positive(start, "an offset in a file")
        _positive(length, "a length in a file")
        if info.get("transform_descriptors"):
            raise MetadataError(f"parts in {name!r:.80} are transformed (compressed), which is not supported")
        where[MetadataIndex(_is(index.get("fqn"), str, "fqn"), offset)] = _StorageInfo(name, start, length)
    tensors: dict[str, Any] = {}
    for key, value in _is(state.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        if isinstance(value, RECORDS[f"{_OF_TORCH}.metadata", "BytesStorageMetadata"]):
            tensors[_is(key, str, "key")] = BytesStorageMetadata()
        else:
            tensors[key] = _tensor(_is(key, str, "key"), value, where)
    return Metadata(tensors, storage_data=where)


def _tensor(key: str, record: Any, where: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    state = _state(record, "TensorStorageMetadata")
    properties = _is(_record(state.get("properties"), "TensorProperties").state, tuple, "properties")
    dtype = _is(properties[0] if properties else None, torch.dtype, "dtype")
    size, chunks, seen = _size(state.get("size"), "size"), [], set()
    for one in _is(state.get("chunks"), list, "chunks"):
        part = _state(one, "ChunkStorageMetadata")
        offsets, sizes = _size(part.get("offsets"), "offsets"), _size(part.get("sizes"), "sizes")
        if not len(offsets) == len(sizes) == len(size):
            raise MetadataError(f"tensor {key}: a part at {list(offsets)} of {list(sizes)} in {list(size)}")
        if offsets in seen:
            raise MetadataError(f"tensor {key}: two parts at {list(offsets)}")
        seen.add(offsets)
        stored = where.get(MetadataIndex(key, offsets))
        if stored is None:
            raise MetadataError(f"tensor {key}: no file has its part at {list(offsets)}")
        if math.prod(sizes) * dtype.itemsize > stored.length:
            raise MetadataError(f"tensor {key}: a part of {list(sizes)} {dtype} in {stored.length} bytes")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _record(value: Any, name: str) -> _Record:
    if not isinstance(value, _Record) or value.name != name:
        _refuse(value, name)
    return value


def _state(value: Any, name: str) -> dict[str, Any]:
    """The fields of `value`, a record of class `name`."""
    return _is(_record(value, name).state, dict, f"the state of {name}")


def _size(value: Any, what: str) -> torch.Size:
    arguments = _record(value, "Size").arguments
    numbers = arguments[0] if len(arguments) == 1 else arguments
    if not isinstance(numbers, tuple | list) or len(numbers) > MOST_DIMENSIONS:
        _refuse(numbers, f"{what}, a size")
    return torch.Size([_positive(number, what) for number in numbers])


def _positive(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        _refuse(value, what)
    return value


def _is(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        _refuse(value, what)
    return value


def _refuse(value: Any, what: str) -> NoReturn:
    raise MetadataError(f"a value of type {type(value).__name__} in place of {what}")
