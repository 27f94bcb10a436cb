"""What is in a checkpoint of any kind here, and how two differ: without ranks, a GPU or a whole model in memory.

A path may be a run's output folder (its newest complete checkpoint), one checkpoint, a folder in Megatron's torch_dist
format, or a Hugging Face folder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from dynamo_megatron.checkpoint_folder import MANIFEST_FILE, checkpoint_folders, fault, latest_checkpoint, read_manifest
from dynamo_megatron.models.torch_dist import TorchDistReader, is_torch_dist

BLOCK_BYTES = 256 << 20  # of a tensor that is compared at once
OPTIMIZER = "optimizer."  # Megatron's keys begin so
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names and torch's


class Tensors(Protocol):
    """Shapes and dtypes by name, and rows of a tensor."""

    shapes: dict[str, tuple[tuple[int, ...], str]]

    def rows(self, name: str, first: int, last: int) -> torch.Tensor: ...


class _TorchDist:
    def __init__(self, folder: Path):
        self._reader = TorchDistReader(folder)
        self.shapes = {
            name: (stored.shape, str(stored.dtype).removeprefix("torch."))
            for name, stored in self._reader.tensors.items()
        }

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        shape = self.shapes[name][0]
        return self._reader.read(name, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))


class _Safetensors:
    def __init__(self, folder: Path):
        self._stack, self._files, self.shapes = ExitStack(), {}, {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
            except SafetensorError as error:
                raise ValueError(f"{path}: not readable ({error})") from None
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                self._files[name] = file
                dtype = piece.get_dtype()
                self.shapes[name] = tuple(piece.get_shape()), DTYPES.get(dtype, dtype)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        return self._files[name].get_slice(name)[first:last]


@dataclass(frozen=True)
class Contents:
    """Of one checkpoint. `problem`: why it is not complete, or None."""

    folder: Path
    kind: str
    facts: dict[str, str]
    problem: str | None
    tensors: Tensors | None = field(repr=False)  # None where they cannot be read
    others: list[str] = field(default_factory=list)  # a run's checkpoints, a line each


def inspect(path: Path) -> Contents:
    """Raises ValueError, one line, where `path` is nothing that could be inspected."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    others: list[str] = []
    if (path / "checkpoints").is_dir():
        root = path / "checkpoints"
        others = [f"step {step}: {fault(folder) or 'complete'}" for step, folder in checkpoint_folders(root)]
        newest = latest_checkpoint(root)
        if newest is None:
            raise ValueError(f"{path}: a run without a complete checkpoint{''.join(f'; {line}' for line in others)}")
        path = newest[1]
    if (path / MANIFEST_FILE).is_file() or re.fullmatch(r"step-\d{6,}", path.name):
        return _with_manifest(path, others)
    if is_torch_dist(path):
        return Contents(path, "Megatron's torch_dist format", _huggingface_facts(path), None, _TorchDist(path))
    if any(path.glob("*.safetensors")):
        return _huggingface(path)
    raise ValueError(f"{path}: neither a run, nor a checkpoint, nor a Hugging Face folder with safetensors")


def _with_manifest(folder: Path, others: list[str]) -> Contents:
    problem, facts, tensors, kind = fault(folder), {}, None, "checkpoint of a run"
    try:
        manifest = read_manifest(folder)
        model, layout = dict(manifest["model"]), manifest["layout"]
        facts = {
            "family": model.pop("family"),
            "model": ", ".join(f"{name} {value}" for name, value in model.items() if value),
            "dtype": manifest["dtype"],
        }
        if layout is None:
            kind = "converted model"
        else:
            sizes = ", ".join(f"{name} {size}" for name, size in layout.items() if name != "ranks")
            facts |= {"step": str(manifest["step"]), "saved by": f"{layout['ranks']} ranks: {sizes}"}
        tensors = _TorchDist(folder)
    except ValueError as error:
        problem = problem or str(error)
    return Contents(folder, kind, facts, problem, tensors, others)


def _huggingface(folder: Path) -> Contents:
    tensors = _Safetensors(folder)
    index, problem = folder / "model.safetensors.index.json", None
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted(set(named) - set(tensors.shapes))
        if missing:
            problem = f"{folder}: {len(missing)} tensors of the index are in no file, such as {missing[0]}"
    return Contents(folder, "Hugging Face folder", _huggingface_facts(folder), problem, tensors)


def _huggingface_facts(folder: Path) -> dict[str, str]:
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: {error}") from None
    shown = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    model = ", ".join(f"{key} {config[key]}" for key in shown if key in config)
    facts = {"family": str(config.get("model_type", "unknown")), "model": model}
    export = folder / "export.json"
    if export.is_file():
        facts["step"] = str(json.loads(export.read_text(encoding="utf-8"))["step"])
    return facts


def describe(contents: Contents) -> str:
    """Some lines for people; tensors that differ by the number of a layer or an expert alone are one line."""
    lines = [f"{contents.folder}: {contents.kind}, {contents.problem or 'complete'}"]
    lines += [f"  {name}: {value}" for name, value in contents.facts.items()]
    if contents.others:
        lines += ["  checkpoints of the run:", *(f"    {line}" for line in contents.others)]
    if contents.tensors is not None:
        lines += _tensor_lines(contents.tensors.shapes)
    files = sorted(p for p in contents.folder.iterdir() if p.is_file())
    sizes = [p.stat().st_size for p in files]
    lines.append(f"  files: {len(files)}, {in_bytes(sum(sizes))}")
    lines += [f"    {p.name}: {in_bytes(size)}" for p, size in zip(files, sizes, strict=True)]
    return "\n".join(lines)


def _tensor_lines(shapes: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
    model = {name: what for name, what in shapes.items() if not name.startswith(OPTIMIZER)}
    optimizer = {name: what for name, what in shapes.items() if name.startswith(OPTIMIZER)}
    count = sum(math.prod(shape) for shape, _ in model.values())
    lines = [f"  parameters: {count:,} in {len(model)} tensors"]
    groups: dict[tuple, int] = {}
    for name, what in sorted(model.items()):
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        groups[pattern, what] = groups.get((pattern, what), 0) + 1
    for (pattern, (shape, dtype)), times in groups.items():
        lines.append(f"    {pattern}  {list(shape)} {dtype}{f', {times} times' if times > 1 else ''}")
    if not optimizer:
        return [*lines, "  optimizer: none"]
    states = sorted({name.removeprefix("optimizer.state.").split(".")[0] for name in optimizer})
    dtypes = sorted({dtype for _, dtype in optimizer.values()})
    return [*lines, f"  optimizer: {', '.join(states)} of every parameter, {', '.join(dtypes)}"]


def in_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    exponent = min(3, max(0, (size.bit_length() - 1) // 10))
    return f"{size} B" if exponent == 0 else f"{size / 1024**exponent:.1f} {('KiB', 'MiB', 'GiB')[exponent - 1]}"


def differences(a: Contents, b: Contents) -> Iterator[str]:
    """A line for each difference of the tensors; nothing where they are the same, bit for bit.

    Raises ValueError where the tensors of one cannot be read.
    """
    for contents in (a, b):
        if contents.tensors is None:
            raise ValueError(contents.problem)
    first, second = a.tensors.shapes, b.tensors.shapes
    for name in sorted(first.keys() | second.keys()):
        if name not in second or name not in first:
            yield f"{name}: only in {(a if name in first else b).folder}"
            continue
        (shape, dtype), (other_shape, other_dtype) = first[name], second[name]
        if shape != other_shape:
            yield f"{name}: shape {list(shape)} and {list(other_shape)}"
            continue
        largest, relative, same = _compare(a.tensors, b.tensors, name, shape)
        if dtype != other_dtype or not same:
            dtypes = f"{dtype} and {other_dtype}, " if dtype != other_dtype else ""
            yield f"{name}: {dtypes}largest difference {largest:.3e}, relative (norm) {relative:.3e}"


def _compare(a: Tensors, b: Tensors, name: str, shape: tuple[int, ...]) -> tuple[float, float, bool]:
    """(largest absolute difference, its norm over the norm of a's, whether all values are equal)."""
    rows = shape[0] if shape else 1
    step = max(1, BLOCK_BYTES * rows // max(1, 4 * math.prod(shape)))
    largest = squares = norm = 0.0
    same = True
    for start in range(0, rows, step):
        x, y = (t.rows(name, start, min(rows, start + step)).float() for t in (a, b))
        same = same and torch.equal(x, y)
        delta = x - y
        largest = max(largest, float(delta.abs().nan_to_num(math.inf).max())) if delta.numel() else largest
        squares += float(delta.double().square().sum())
        norm += float(x.double().square().sum())
    return largest, math.sqrt(squares / norm) if norm else math.sqrt(squares), same
