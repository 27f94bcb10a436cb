"""Writes Hugging Face safetensors one tensor at a time; the library's own writer needs all tensors of a file at once.

A file is 8 bytes (the header's length, little endian), a JSON header and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from dynamo_megatron.checkpoint.safetensors_folder import FLOATING, INDEX, SINGLE_FILE

DTYPE_NAMES = {dtype: name for name, dtype in FLOATING.items()}
FILE_BYTES = 4 << 30


def write_safetensors(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    get: Callable[[str], torch.Tensor],
) -> None:
    """Writes `tensors` (name -> dtype, shape) in this order into files of at most FILE_BYTES, or of one larger tensor.
    Several files get an index. `get` returns each tensor when it is written. Raises OSError.
    """
    files: list[list[str]] = [[]]
    held = 0
    for name, spec in tensors.items():
        size = nbytes(*spec)
        if files[-1] and held + size > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    names = [SINGLE_FILE]
    if len(files) > 1:
        names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for file_name, members in zip(names, files, strict=True):
        _write_file(folder / file_name, {name: tensors[name] for name in members}, get)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(nbytes(*spec) for spec in tensors.values())},
            "weight_map": {name: file for file, members in zip(names, files, strict=True) for name in members},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _write_file(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], get: Callable[[str], torch.Tensor]
) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + nbytes(dtype, shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            tensor = get(name)
            assert tensor.dtype == dtype and tuple(tensor.shape) == tuple(shape), f"{name}: {tensor.dtype}"
            stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
