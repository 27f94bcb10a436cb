"""`dynamo-megatron convert`: Hugging Face folders to Megatron checkpoints and back, one tensor at a time on one CPU."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError

from dynamo_megatron.checkpoint.folder import (
    UNVERIFIED,
    checkpoint_folders,
    complete_checkpoints,
    fault,
    sync_folder,
    verify,
    write_manifest,
)
from dynamo_megatron.checkpoint.megatron_folder import MegatronFolder, converted, write_megatron
from dynamo_megatron.checkpoint.safetensors_folder import (
    CHAT_TEMPLATE_FILE,
    SafetensorsFolder,
    companion_files,
    set_dtype,
)
from dynamo_megatron.checkpoint.safetensors_writer import nbytes, write_safetensors
from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, read_yaml
from dynamo_megatron.errors import InputError
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.mapping import huggingface_shapes
from dynamo_megatron.runtime.plain_text import on_one_line

NAME_MODEL = "`convert mcore2hf --model HF` names the folder of config.json and tokenizer"
OVERHEAD = 4096  # bytes per tensor, for the formats' metadata


def find_checkpoint(path: str | Path, step: int | None = None) -> tuple[int, Path]:
    """Returns (step, folder) of the checkpoint `path`, or of the checkpoint of the run `path` at `step` (None: the
    newest complete one). Raises ConfigError if there is no such complete checkpoint.
    """
    path = Path(path).resolve()
    if path.parent.name == "checkpoints" and step is None:
        meant = [found for found in checkpoint_folders(path.parent) if found[1] == path]
    else:
        meant = [found for found in checkpoint_folders(path / "checkpoints") if step in (None, found[0])]
    faults = []
    for found in reversed(meant):
        if (why := fault(found[1])) is None:
            return found
        faults.append(why)
    if faults:
        raise ConfigError(
            f"{path}: no complete checkpoint{f' of step {step}' if step is not None else ''}: {faults[0]}"
        )
    if step is not None:
        there = ", ".join(str(n) for n, _ in complete_checkpoints(path / "checkpoints")) or "none"
        raise ConfigError(f"--step: {path} has no complete checkpoint of step {step}; it has {there}")
    raise ConfigError(f"{path}: neither a checkpoint nor a run with a complete one in its checkpoints/")


def run_config(checkpoint: Path) -> Config:
    """Returns the config of the run that a checkpoint belongs to. Raises ConfigError."""
    file = checkpoint.parents[1] / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{file}: not found; keep a checkpoint in its run's folder, or {NAME_MODEL}")
    try:
        return Config.model_validate(read_yaml(file, str(file)))
    except ValidationError as error:
        raise ConfigError(f"{file}: not the config of a run: {on_one_line(str(error), 500)}") from None


def open_checkpoint(
    path: str | Path, step: int | None = None, model: Path | None = None
) -> tuple[MegatronFolder, ModelSpec, Path]:
    """Returns (tensors, spec, folder of config.json and tokenizer). `path`: a folder that `hf2mcore` wrote, a run, its
    checkpoint, or any other folder in Megatron's torch_dist format. `model`: the folder of config.json and tokenizer;
    None: `path` if it has a config.json, else the `model.path` of its run.

    Raises ConfigError if a file is missing, ValueError if the tensors are damaged or are not those of the model.
    """
    path, family = Path(path), None
    in_run = path.resolve().parent.name == "checkpoints" and not (path / "config.json").is_file()
    alone = step is None and is_torch_dist(path) and not in_run
    checkpoint = path if alone else find_checkpoint(path, step)[1]
    if model is None and (checkpoint / "config.json").is_file():
        model = checkpoint
    elif model is None and alone:
        raise ConfigError(f"{path}: no config.json in it, and it is not in the folder of a run; {NAME_MODEL}")
    elif model is None:
        config = run_config(checkpoint).model
        model, family = Path(config.path), config.family
        if not model.is_dir():
            raise ConfigError(f"{path}: no folder {model} here, which the run's model.path names; {NAME_MODEL}")
    spec = load_model_config(model, family)
    return _verified(MegatronFolder(checkpoint, spec)), spec, model


def _verified(folder: MegatronFolder) -> MegatronFolder:
    """Raises ValueError if the bytes are not those that were saved; warns if there are no checksums to compare."""
    if not verify(folder.path):
        print(f"{folder.path}: {UNVERIFIED}", file=sys.stderr)
    return folder


def hf2mcore(source: Path, out: Path, dtype: str | None = None) -> None:
    """Writes the Hugging Face folder `source` as a Megatron checkpoint that any layout loads, with config.json and
    tokenizer beside it; `dtype` None: each tensor keeps its own.

    Raises ConfigError or ValueError if it cannot be converted or `out` cannot be used, OSError if writing fails.
    """
    spec = load_model_config(source)
    with SafetensorsFolder(source, spec) as folder:
        kinds = {name: _kind(folder.dtype(name), dtype) for name in folder.names}
        with _aside(out, source, _bytes(spec, kinds)) as unfinished:
            checksums = write_megatron(spec, folder.get, unfinished, kinds[folder.names[0]] if dtype else None)
            stored = ", ".join(sorted({str(kind).removeprefix("torch.") for kind in kinds.values()}))
            contents = {"step": None, "model": spec.dimensions(), "dtype": stored, "layout": None}
            write_manifest(unfinished, contents, checksums)
            _copy_companions(source, unfinished, dtype)  # not in the manifest: users edit them
            sync_folder(unfinished)


def mcore2hf(
    source: str | Path, out: Path, dtype: str | None = None, step: int | None = None, model: Path | None = None
) -> None:
    """Writes a Megatron checkpoint (as `open_checkpoint` finds it) as a Hugging Face folder; raises as `hf2mcore`."""
    folder, spec, model = open_checkpoint(source, step, model)
    kinds = {name: _kind(folder.dtype(name), dtype) for name in folder.names}
    shapes = huggingface_shapes(spec)
    with _aside(out, model, _bytes(spec, kinds)) as unfinished:
        tensors = {name: (kind, shapes[name]) for name, kind in kinds.items()}
        write_safetensors(unfinished, tensors, lambda name: converted(name, folder.get(name), kinds[name]))
        single = {str(kind).removeprefix("torch.") for kind in kinds.values()}
        _copy_companions(model, unfinished, single.pop() if len(single) == 1 else None)
        parent = folder.path.resolve().parent
        if parent.name == "checkpoints" and (template := parent.parent / CHAT_TEMPLATE_FILE).is_file():
            shutil.copy(template, unfinished / CHAT_TEMPLATE_FILE)  # the run trained with it
        sync_folder(unfinished)


def compare_weights(a: str | Path, b: str | Path) -> tuple[dict[str, float], list[str]]:
    """Compares two model folders, Hugging Face's or Megatron's (`open_checkpoint`), one tensor at a time. Returns
    ({tensor: largest absolute difference}, names of the tensors that are not bit-equal).

    Raises ConfigError or ValueError if a folder cannot be read or if they are different models.
    """
    (one, spec), (two, other) = _open(a), _open(b)
    theirs = other.dimensions()
    if differ := [f"{key} {v} and {theirs[key]}" for key, v in spec.dimensions().items() if v != theirs[key]]:
        raise InputError(f"{a} and {b} are different models: {', '.join(differ)}")
    largest, unequal = {}, []
    # Megatron's order, in which each parameter is read once
    for name in next((f.names for f in (one, two) if isinstance(f, MegatronFolder)), one.names):
        x, y = one.get(name), two.get(name)
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            largest[name] = 0.0
            continue
        unequal.append(name)
        largest[name] = max(float((p.float() - q.float()).abs().nan_to_num(math.inf).max()) for p, q in _rows(x, y))
    return largest, unequal


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)  # NaN is equal to itself, 0 is not -0


def _rows(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the same rows of both tensors, about 2^24 values at a time: comparing them whole would take several copies
    in memory."""
    rows = max(1, (1 << 24) // max(1, x[0].numel()))
    return zip(x.split(rows), y.split(rows), strict=True)


def _open(path: str | Path) -> tuple[SafetensorsFolder | MegatronFolder, ModelSpec]:
    path = Path(path)
    if (path / "config.json").is_file():
        spec = load_model_config(path)
        folder = open_weights(path, spec)
        return (_verified(folder) if isinstance(folder, MegatronFolder) else folder), spec
    folder, spec, _ = open_checkpoint(path)
    return folder, spec


def _kind(stored: torch.dtype, dtype: str | None) -> torch.dtype:
    return getattr(torch, dtype) if dtype else stored


def _bytes(spec: ModelSpec, kinds: dict[str, torch.dtype]) -> int:
    shapes = huggingface_shapes(spec)
    return sum(nbytes(kinds[name], shape) + OVERHEAD for name, shape in shapes.items())


def _copy_companions(source: Path, target: Path, dtype: str | None) -> None:
    """Copies config.json (its dtype set to `dtype`), tokenizer, generation config and chat template."""
    for file in companion_files(source):
        shutil.copy(file, target / file.name)
    if dtype is not None:
        set_dtype(target, dtype)


@contextlib.contextmanager
def _aside(out: Path, companions: Path, size: int) -> Iterator[Path]:
    """Yields a new folder beside `out`. It is renamed to `out` if all goes well, and removed otherwise, after Ctrl-C,
    too. `size`: bytes of the tensors; the files of `companions` are added.

    Raises ConfigError if `out` exists, cannot be written or does not fit on the disk.
    """
    if out.exists():
        raise ConfigError(f"{out}: is there already; name another folder")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        free = shutil.disk_usage(unfinished).free
    except FileExistsError:
        raise ConfigError(f"{unfinished}: another conversion writes it, or was killed and left it; remove it") from None
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        size += sum(file.stat().st_size for file in companion_files(companions))
        if size > free:
            raise ConfigError(f"{out}: needs {size / 1e9:.3f} GB, the disk has {free / 1e9:.3f} GB free")
        yield unfinished
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
