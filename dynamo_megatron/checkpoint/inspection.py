"""Shows the content of a checkpoint of any supported format, and how two differ.

This needs no ranks and no GPU, and never has a whole model in memory. A path may be a run's output folder (its newest
complete checkpoint), one checkpoint, a folder in Megatron's torch_dist format, or a Hugging Face folder.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE, SafetensorsFiles
from dynamo_megatron.checkpoint.torch_dist import CRITIC, OPTIMIZER, TorchDistReader, is_torch_dist
from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.plain_text import escaped_line, show

BLOCK_VALUES = 4 << 20  # values that are compared at once, in float64
SHOWN = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
Tensors = TorchDistReader | SafetensorsFiles


@dataclass
class Contents:
    """The content of one checkpoint."""

    folder: Path
    kind: str
    facts: dict[str, str]
    problem: str | None = None  # why it, or a newer one of its run, is not complete
    tensors: Tensors | None = None  # None where they cannot be read


def inspect(path: Path) -> Contents:
    """The content of the checkpoint at `path`. Raises ValueError (one line) where there is none of any kind."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    others: dict[str, str] = {}
    newest_fault = None
    if (root := path / "checkpoints").is_dir():
        others = {f"step {step}": fault(folder) or "complete" for step, folder in checkpoint_folders(root)}
        newest = latest_checkpoint(root)
        if newest is None:
            listed = "".join(f"; {step}: {why}" for step, why in others.items())
            raise InputError(f"{path}: a run without a complete checkpoint{listed}")
        path = newest[1]
        step, last = checkpoint_folders(root)[-1]
        newest_fault = fault(last) and f"complete, but step {step}, the newest, is not"
    if (path / MANIFEST_FILE).is_file() or re.fullmatch(r"step-\d{6,}", path.name):
        contents = _with_manifest(Contents(path, "checkpoint of a run", others))
        contents.problem = contents.problem or newest_fault
        return contents
    torch_dist = is_torch_dist(path)
    if not torch_dist and not any(path.glob("*.safetensors")):
        raise InputError(f"{path}: neither a run, nor a checkpoint, nor a Hugging Face folder with safetensors")
    facts = {}
    if (file := path / "config.json").is_file():
        config = plain_json.read_object(file)
        shown = ", ".join(f"{key} {config[key]}" for key in SHOWN if key in config)
        facts["model"] = f"family {config.get('model_type', 'unknown')}, {shown}"
    if (file := path / EXPORT_FILE).is_file():
        facts["step"] = str(plain_json.read_object(file).get("step"))
    if torch_dist:
        facts["bytes"] = UNVERIFIED
        return Contents(path, "Megatron's torch_dist format", facts, tensors=TorchDistReader(path))
    return Contents(path, "Hugging Face folder", facts, tensors=SafetensorsFiles(path))


def _with_manifest(contents: Contents) -> Contents:
    folder, facts = contents.folder, contents.facts
    try:
        manifest = read_manifest(folder)
        facts["model"] = ", ".join(f"{name} {value}" for name, value in manifest["model"].items() if value)
        facts["dtype"] = manifest["dtype"]
        if manifest["layout"] is None:
            contents.kind = "converted model"
        else:
            facts["step"] = str(manifest["step"])
            facts["saved by"] = ", ".join(
                f"{name} {size}" for name, size in manifest["layout"].items() if size is not None
            )
        if "lora" in manifest:  # the base is in no checkpoint
            facts["adapters"] = ", ".join(f"{name} {value}" for name, value in manifest["lora"].items())
        contents.tensors = TorchDistReader(folder)  # shown as far as they can be read
        contents.problem = fault(folder)
        if contents.problem is None:
            verify(folder)
            facts["bytes"] = "as saved, by their checksums"
    except ValueError as error:
        contents.problem = fault(folder) or str(error)
    return contents


def describe(contents: Contents) -> str:
    """A text for people, without control characters. Tensors whose names differ only in the number of a layer or an
    expert share one line."""
    lines = [f"{contents.folder}: {contents.kind}, {contents.problem or 'complete'}"]
    lines += [f"  {name}: {value}" for name, value in contents.facts.items()]
    if contents.tensors is not None:
        lines += _tensor_lines(contents.tensors)
    files = {p.name: p.stat().st_size for p in sorted(contents.folder.iterdir()) if p.is_file()}
    lines.append(f"  files: {len(files)}, {sum(files.values()):,} bytes")
    lines += [f"    {name}: {size:,} bytes" for name, size in files.items()]
    return "\n".join(escaped_line(line) for line in lines)


def _tensor_lines(tensors: Tensors) -> list[str]:
    stored = {name: tensors.stored(name) for name in sorted(tensors.names)}
    model = {name: what for name, what in stored.items() if not name.startswith((OPTIMIZER, CRITIC))}
    count = sum(math.prod(shape) for shape, _ in model.values())
    lines = [f"  parameters: {count:,} in {len(model)} tensors"]
    groups = Counter((re.sub(r"\.\d+\.", ".*.", name), what) for name, what in model.items())
    for (pattern, (shape, dtype)), times in groups.items():
        lines.append(f"    {pattern}  {list(shape)} {_name(dtype)}{f', {times} times' if times > 1 else ''}")
    critic = [math.prod(shape) for name, (shape, _) in stored.items() if name.startswith(CRITIC)]
    if critic:
        lines.append(f"  critic: {sum(critic):,} elements in {len(critic)} tensors, its optimizer's included")
    kept = ((name, dtype) for name, (_, dtype) in stored.items() if name.startswith(OPTIMIZER))
    optimizer = [(name.split(".")[2], _name(dtype)) for name, dtype in kept]
    if not optimizer:
        return [*lines, "  optimizer: none"]
    states, dtypes = (", ".join(sorted(set(found))) for found in zip(*optimizer, strict=True))
    return [*lines, f"  optimizer: {states} of every parameter, {dtypes}"]


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def differences(a: Contents, b: Contents) -> Iterator[str]:
    """Yields one line for each tensor that differs; nothing where all tensors are bit-identical. Raises ValueError
    where the tensors of a checkpoint cannot be read, or only one of the two is in Megatron's format."""
    for contents in (a, b):
        if contents.tensors is None:
            raise InputError(contents.problem)
    if isinstance(a.tensors, TorchDistReader) != isinstance(b.tensors, TorchDistReader):
        raise InputError(
            f"--diff: {a.folder} and {b.folder} name their tensors differently; `convert mcore2hf` writes a checkpoint "
            "in Hugging Face's form"
        )
    first, second = set(a.tensors.names), set(b.tensors.names)
    for name in sorted(first | second):
        if name not in first & second:
            yield f"{name}: only in {(a if name in first else b).folder}"
            continue
        (shape, dtype), (other_shape, other_dtype) = a.tensors.stored(name), b.tensors.stored(name)
        if shape != other_shape:
            yield f"{name}: shape {list(shape)} and {list(other_shape)}"
            continue
        largest, relative, same = _compare(a.tensors, b.tensors, name)
        if dtype != other_dtype or not same:
            dtypes = f"{_name(dtype)} and {_name(other_dtype)}, " if dtype != other_dtype else ""
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
    Returns the exit code: 1 where a checkpoint, or a newer one of its run, is not complete or the two differ, else 0.
    Raises ValueError (one line)."""
    if diff is None:
        contents = inspect(path)
        print(describe(contents))
        return int(contents.problem is not None)
    found, sides = 0, [inspect(each) for each in diff]
    if damaged := [f"{side.folder}: {side.problem}" for side in sides if side.problem is not None]:
        show("\n".join(damaged))
    for line in differences(*sides):
        print(escaped_line(line), flush=True)
        found += 1
    print(f"{found} of the tensors differ" if found else "the same tensors, bit for bit")
    return int(found > 0 or bool(damaged))
