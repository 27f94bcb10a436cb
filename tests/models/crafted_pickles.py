"""Pickles and checkpoint files that run a command, or take the reader's memory or stack, when they are unpickled."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)


class _Calls:
    """Unpickles as the call of a function."""

    def __init__(self, function: Callable, *arguments: object):
        self._called = function, arguments

    def __reduce__(self) -> tuple:
        return self._called


class _WithState:
    """Its class is what a crafted pickle names first: nothing that a checkpoint holds."""


def _by_hand(*instructions: bytes) -> bytes:
    return b"\x80\x04" + b"".join(instructions) + b"."


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def running(command: str, protocol: int = 4) -> dict[str, tuple[bytes, str]]:
    """{kind: (pickle that runs `command` in the shell, what its refusal names)}, in `protocol` where it is not said."""
    system, metadata = _Calls(os.system, command), "torch.distributed.checkpoint.metadata"
    named_metadata = _text(metadata) + _text("Metadata") + b"\x93"
    made = {
        "reduce": (pickle.dumps(system, protocol), "posix.system"),
        "protocol 0": (pickle.dumps(system, 0), "posix.system"),
        "protocol 2": (pickle.dumps(system, 2), "posix.system"),
        "protocol 5": (pickle.dumps(system, 5), "posix.system"),
        "in a list": (pickle.dumps([1, [2, [system]]], protocol), "posix.system"),
        "as a key": (pickle.dumps({(1, 2): {"k": system}}, protocol), "posix.system"),
        "eval": (pickle.dumps(_Calls(builtins.eval, f"__import__('os').system({command!r})"), protocol), "eval"),
        "getattr": (pickle.dumps(_Calls(getattr, 1, "real"), protocol), "getattr"),
        "copyreg": (pickle.dumps(_Calls(copyreg._reconstructor, _WithState, object, None), protocol), "_reconstructor"),
        "a state on the list": (
            pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta(modules=[system])), protocol),
            "posix.system",
        ),
        "a dotted name": (
            _by_hand(_text("torch.serialization"), _text("os.system"), b"\x93", _text(command), b"\x85R"),
            "torch.serialization.os.system",
        ),
        "__setstate__ of a listed class": (
            _by_hand(named_metadata, b")\x81", b"}", _text("__setstate__"), _text("posix"), _text("system"), b"\x93sb"),
            "posix.system",
        ),
        "INST": (b"(S" + repr(command).encode() + b"\niposix\nsystem\n.", "'S'"),
        "OBJ": (b"(cposix\nsystem\n" + b"S" + repr(command).encode() + b"\no.", "posix.system"),
        "persistent id": (b"Pposix.system\n.", "'P'"),
    }  # fmt: skip
    return made


def exhausting() -> dict[str, bytes]:
    """{kind: pickle that takes gigabytes, or kills the interpreter, where instructions and keys are not restricted}."""
    deep = b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns."
    return {
        "a memo of 2**31 entries": b"\x80\x04Nr\xff\xff\xff\x7f.",
        "a bytearray of 2**40": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
        "a text of 2**40": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
        "a key 200,000 deep": deep,
        "an unknown instruction": b"\x80\x04\xff.",
        "not a pickle": os.urandom(64),
        "empty": b"",
    }


def metadata_of(**changes: object) -> bytes:
    """`.metadata` of one tensor "w" of 4 values, with fields of its part's place changed."""
    place = {"relative_path": "__0_0.distcp", "offset": 0, "length": 10_000} | changes
    part = torch.distributed.checkpoint.metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    whole = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [part])
    return pickle.dumps(Metadata({"w": whole}, storage_data={MetadataIndex("w", (0,)): _StorageInfo(**place)}))


def torch_files(command: str) -> dict[str, tuple[bytes, str]]:
    """As `running`, inside what torch.save writes (in protocol 2): the archive, and the legacy format."""
    made = {}
    for kind, (crafted, named) in running(command, protocol=2).items():
        stream = io.BytesIO()
        torch.save({"x": 1}, stream)
        copied = io.BytesIO()
        with zipfile.ZipFile(stream) as source, zipfile.ZipFile(copied, "w") as target:
            for entry in source.infolist():
                content = crafted if entry.filename.endswith("/data.pkl") else source.read(entry)
                target.writestr(entry.filename, content)
        made[kind] = copied.getvalue(), named
    legacy = io.BytesIO()
    torch.save(_Calls(os.system, command), legacy, _use_new_zipfile_serialization=False)
    made["legacy"] = legacy.getvalue(), "posix.system"
    return made


def runs_it(crafted: bytes, ran: Path) -> bool:
    """Whether Python's own unpickler does run the command, which leaves the file `ran`."""
    with contextlib.suppress(Exception):  # the command runs before what comes of it is used
        pickle.loads(crafted)
    there = ran.exists()
    ran.unlink(missing_ok=True)
    return there
