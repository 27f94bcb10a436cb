"""Shows the content of a checkpoint of any supported format, and how two differ.

This needs no ranks and no GPU, and never has a whole model in memory. A path may be a run's output folder (its newest
complete checkpoint), one checkpoint, a folder in Megatron's torch_dist format, or a Hugging Face folder.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from dynamo_megatron.checkpoint.folder import (
    MANIFEST_FILE,
    UNVERIFIED,
    checkpoint_folders,
    fault,
    latest_checkpoint,
    read_manifest,
    verify,
)
from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE, FLOATING, SafetensorsFiles
from dynamo_megatron.checkpoint.torch_dist import TorchDistReader, is_torch_dist
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import escaped_line, on_one_line

PART_VALUES = 64 << 20  # values of a safetensors tensor that are read at once
BLOCK_VALUES = 4 << 20  # values that are compared at once, in float64
OPTIMIZER = "optimizer."  # the beginning of Megatron's keys of optimizer tensors
MOST_LINES, LONGEST_FACT, LISTED = 1000, 300, 20  # lines of tensors and of files; characters; kinds of optimizer states
FREE_MEMORY = 8 << 30  # bytes that an inspection may take besides three times the folders' size
Part = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size of a region of a tensor


class Tensors(Protocol):
    """A checkpoint's tensors: shape and dtype by name. They are read in parts; those that `parts` gives are cheap."""

    shapes: dict[str, tuple[tuple[int, ...], str]]

    def parts(self, name: str) -> list[Part]: ...

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor: ...


class _TorchDist:
    def __init__(self, folder: Path):
        reader = TorchDistReader(folder)
        self.shapes = {name: (stored.shape, _torch_name(stored.dtype)) for name, stored in reader.tensors.items()}
        self.parts, self.read = reader.parts, reader.read


class _Safetensors:
    def __init__(self, folder: Path):
        self._files = SafetensorsFiles(folder)
        self.shapes = {}
        for name in self._files.names:
            shape, kind = self._files.stored(name)
            self.shapes[name] = shape, _torch_name(FLOATING[kind]) if kind in FLOATING else kind

    def parts(self, name: str) -> list[Part]:
        shape = self.shapes[name][0]
        if not shape:
            return [((), ())]
        rows = max(1, PART_VALUES // max(1, math.prod(shape[1:])))
        rest = (0,) * (len(shape) - 1)
        return [((row, *rest), (min(rows, shape[0] - row), *shape[1:])) for row in range(0, shape[0], rows)]

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        if not size:
            return self._files.get(name)
        tensor = self._files.rows(name, offset[0], offset[0] + size[0])
        return tensor[tuple(slice(o, o + n) for o, n in zip((0, *offset[1:]), size, strict=True))]


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Contents:
    """The content of one checkpoint. `problem`: the reason why it is not complete, or None."""

    folder: Path
    kind: str
    facts: dict[str, str]
    problem: str | None
    tensors: Tensors | None = field(repr=False)  # None where they cannot be read
    others: list[str] = field(default_factory=list)  # all checkpoints of the run, one line each


def inspect(path: Path) -> Contents:
    """The content of the checkpoint at `path`. Raises ValueError (one line) where there is none of any kind."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    others: list[str] = []
    if (path / "checkpoints").is_dir():
        root = path / "checkpoints"
        others = [f"step {step}: {fault(folder) or 'complete'}" for step, folder in checkpoint_folders(root)]
        newest = latest_checkpoint(root)
        if newest is None:
            raise InputError(f"{path}: a run without a complete checkpoint{''.join(f'; {line}' for line in others)}")
        path = newest[1]
    if (path / MANIFEST_FILE).is_file() or re.fullmatch(r"step-\d{6,}", path.name):
        return _with_manifest(path, others)
    if is_torch_dist(path):
        return Contents(path, "Megatron's torch_dist format", _huggingface_facts(path), None, _TorchDist(path))
    if any(path.glob("*.safetensors")):
        return Contents(path, "Hugging Face folder", _huggingface_facts(path), None, _Safetensors(path))
    raise InputError(f"{path}: neither a run, nor a checkpoint, nor a Hugging Face folder with safetensors")


def _with_manifest(folder: Path, others: list[str]) -> Contents:
    problem, facts, tensors, kind = fault(folder), {}, None, "checkpoint of a run"
    verified = False
    try:
        verified = problem is None and verify(folder)
    except ValueError as error:
        problem = str(error)  # the tensors are shown nevertheless, as far as they can be read
    try:
        manifest = read_manifest(folder)
        model, layout = dict(manifest["model"]), manifest["layout"]
        facts = {
            "family": str(model.pop("family", "unknown")),
            "model": ", ".join(f"{name} {value}" for name, value in model.items() if value),
            "dtype": str(manifest["dtype"]),
        }
        if layout is None:
            kind = "converted model"
        else:
            sizes = ", ".join(f"{name} {size}" for name, size in layout.items() if name != "ranks")
            facts |= {"step": str(manifest["step"]), "saved by": f"{layout.get('ranks')} ranks: {sizes}"}
        if problem is None:
            facts["bytes"] = "as saved, by their checksums" if verified else UNVERIFIED
        tensors = _TorchDist(folder)
    except ValueError as error:
        problem = problem or str(error)
    return Contents(folder, kind, facts, problem, tensors, others)


def _huggingface_facts(folder: Path) -> dict[str, str]:
    config = _json_object(folder / "config.json")
    if config is None:
        return {}
    shown = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
    model = ", ".join(f"{key} {config[key]}" for key in shown if key in config)
    facts = {"family": str(config.get("model_type", "unknown")), "model": model}
    export = _json_object(folder / EXPORT_FILE)
    return facts | ({"step": str(export.get("step"))} if export is not None else {})


def _json_object(file: Path) -> dict | None:
    """The JSON object in `file`; None where there is no such file."""
    return plain_json.read_object(file) if file.is_file() else None


def describe(contents: Contents) -> str:
    """A text for people, without control characters. Tensors whose names differ only in the number of a layer or an
    expert share one line."""
    lines = [f"{contents.folder}: {contents.kind}, {contents.problem or 'complete'}"]
    lines += [f"  {name}: {on_one_line(value, LONGEST_FACT)}" for name, value in contents.facts.items()]
    if contents.others:
        lines += ["  checkpoints of the run:", *(f"    {line}" for line in contents.others)]
    if contents.tensors is not None:
        lines += _tensor_lines(contents.tensors.shapes)
    files = sorted(p for p in contents.folder.iterdir() if p.is_file())
    sizes = [p.stat().st_size for p in files]
    lines.append(f"  files: {len(files)}, {in_bytes(sum(sizes))}")
    targets = [f" -> {os.readlink(p)}" if p.is_symlink() else "" for p in files]
    lines += [f"    {p.name}{to}: {in_bytes(n)}" for p, to, n in zip(files, targets, sizes, strict=True)][:MOST_LINES]
    lines += [f"    and {len(files) - MOST_LINES:,} more"] * (len(files) > MOST_LINES)
    return "\n".join(escaped_line(line) for line in lines)


def _tensor_lines(shapes: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
    model = {name: what for name, what in shapes.items() if not name.startswith(OPTIMIZER)}
    optimizer = {name: what for name, what in shapes.items() if name.startswith(OPTIMIZER)}
    count = sum(math.prod(shape) for shape, _ in model.values())
    lines = [f"  parameters: {count:,} in {len(model)} tensors"]
    groups: dict[tuple, int] = {}
    for name, what in sorted(model.items()):
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        groups[pattern, what] = groups.get((pattern, what), 0) + 1
    for (pattern, (shape, dtype)), times in itertools.islice(groups.items(), MOST_LINES):
        lines.append(f"    {pattern}  {list(shape)} {dtype}{f', {times} times' if times > 1 else ''}")
    lines += [f"    and {len(groups) - MOST_LINES:,} more"] * (len(groups) > MOST_LINES)
    if not optimizer:
        return [*lines, "  optimizer: none"]
    states = sorted({name.removeprefix("optimizer.state.").split(".")[0] for name in optimizer})[:LISTED]
    dtypes = sorted({dtype for _, dtype in optimizer.values()})[:LISTED]
    return [*lines, f"  optimizer: {', '.join(states)} of every parameter, {', '.join(dtypes)}"]


def in_bytes(size: int) -> str:
    """1536 -> "1.5 KiB"."""
    exponent = min(3, max(0, (size.bit_length() - 1) // 10))
    return f"{size} B" if exponent == 0 else f"{size / 1024**exponent:.1f} {('KiB', 'MiB', 'GiB')[exponent - 1]}"


def differences(a: Contents, b: Contents) -> Iterator[str]:
    """Yields one line for each tensor that differs; nothing where all tensors are bit-identical.

    Raises ValueError where the tensors of a checkpoint cannot be read.
    """
    for contents in (a, b):
        if contents.tensors is None:
            raise InputError(contents.problem)
    first, second = a.tensors.shapes, b.tensors.shapes
    for name in sorted(first.keys() | second.keys()):
        if name not in second or name not in first:
            yield f"{name}: only in {(a if name in first else b).folder}"
            continue
        (shape, dtype), (other_shape, other_dtype) = first[name], second[name]
        if shape != other_shape:
            yield f"{name}: shape {list(shape)} and {list(other_shape)}"
            continue
        largest, relative, same = _compare(a.tensors, b.tensors, name)
        if dtype != other_dtype or not same:
            dtypes = f"{dtype} and {other_dtype}, " if dtype != other_dtype else ""
            yield f"{name}: {dtypes}largest difference {largest:.3e}, relative (norm) {relative:.3e}"


def _compare(a: Tensors, b: Tensors, name: str) -> tuple[float, float, bool]:
    """(largest absolute difference, norm of the difference over the norm of a's finite values, True where all bits are
    the same)."""
    largest = squares = norm = 0.0
    same = True
    # Iterate over the larger parts: then most of the smaller parts are read only once.
    for offset, size in min(a.parts(name), b.parts(name), key=len):
        blocks = (t.read(name, offset, size).flatten().split(BLOCK_VALUES) for t in (a, b))
        for x, y in zip(*blocks, strict=True):
            same = same and x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            x, y = x.double(), y.double()
            alike = (x == y) | (x.isnan() & y.isnan())
            delta = torch.where(alike, 0.0, x - y).abs().nan_to_num(math.inf)
            largest = max(largest, float(delta.max())) if delta.numel() else largest
            squares += float(delta.square().sum())
            norm += float(x[x.isfinite()].square().sum())
    return largest, math.sqrt(squares / norm) if norm else math.sqrt(squares), same


def inspect_command(path: Path | None, diff: list[Path] | None) -> int:
    """Prints the content of `path`, or the differences of the two paths in `diff`; exactly one of the arguments is set.
    Returns the exit code: 1 where the checkpoint is not complete or the two differ, else 0. Raises ValueError (one
    line)."""
    paths = [path] if diff is None else diff
    named = " ".join(map(str, paths))
    try:
        with _memory_limited(paths):
            if diff is None:
                contents = inspect(path)
                print(describe(contents))
                return int(contents.problem is not None)
            found = 0
            for line in differences(*map(inspect, paths)):
                print(escaped_line(line), flush=True)
                found += 1
    except MemoryError:
        raise InputError(
            f"{named}: needs more memory than {FREE_MEMORY >> 30} GiB and three times its size on the disk"
        ) from None
    except RecursionError:
        raise InputError(f"{named}: nested too deep") from None
    print(f"{found} of the tensors differ" if found else "the same tensors, bit for bit")
    return int(found > 0)


@contextlib.contextmanager
def _memory_limited(paths: list[Path]) -> Iterator[None]:
    """Limits this process's memory to FREE_MEMORY and three times the folders' size on disk, since the content of an
    untrusted file could take any amount of memory."""
    folders = [folder for path in paths for folder in (path, *path.glob("checkpoints/*"))]
    files = [file.stat() for folder in folders if folder.is_dir() for file in folder.iterdir() if file.is_file()]
    with open("/proc/self/status", encoding="ascii") as status:
        now = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    limit = now + FREE_MEMORY + 3 * sum(512 * file.st_blocks for file in files)
    before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lower = (limit, *(one for one in before if one != resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_DATA, (min(lower), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
