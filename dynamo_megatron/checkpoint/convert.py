"""`dynamo-megatron convert`: Hugging Face folders to Megatron checkpoints and back, one tensor at a time on one CPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from dynamo_megatron.checkpoint.adapters import MergedFolder, read_lora, write_peft
from dynamo_megatron.checkpoint.folder import (
    MANIFEST_FILE,
    UNVERIFIED,
    checkpoint_folders,
    fault,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
)
from dynamo_megatron.checkpoint.safetensors_folder import (
    CHAT_TEMPLATE_FILE,
    SINGLE_FILE,
    SafetensorsFolder,
    copy_companions,
    nbytes,
    set_dtype,
    write_file,
    write_index,
)
from dynamo_megatron.checkpoint.torch_dist import MegatronFolder, is_torch_dist, write_megatron
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, read_yaml
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.mapping import cut, huggingface_shapes
from dynamo_megatron.runtime.plain_text import on_one_line, show

NAME_MODEL = "`convert mcore2hf --model HF` names the folder of config.json and tokenizer"
FILE_BYTES = 4 << 30  # of a safetensors file, more where one tensor is larger


def find_checkpoint(path: str | Path, step: int | None = None) -> tuple[int, Path]:
    """Returns (step, folder) of the checkpoint `path`, or of the checkpoint of the run `path` at `step` (None: the
    newest complete one). Raises ConfigError if there is no such complete checkpoint.
    """
    path = _located(path)
    # A run's folder may itself lie in a folder of that name.
    one = step is None and path.parent.name == "checkpoints" and not (path / "checkpoints").is_dir()
    there = checkpoint_folders(path.parent if one else path / "checkpoints")
    meant = [found for found in there if (found[1] == path if one else step in (None, found[0]))]
    if complete := [found for found in meant if fault(found[1]) is None]:
        for number, folder in (found for found in meant if found[0] > complete[-1][0]):
            why = f"the checkpoint of step {number} is damaged: {fault(folder)}"
            show(f"warning: {why}; taking that of step {complete[-1][0]}")
        return complete[-1]
    if meant:
        raise ConfigError(f"{path}: no complete checkpoint: {fault(meant[-1][1])}")
    if step is not None:
        steps = ", ".join(str(number) for number, _ in there) or "none"
        raise ConfigError(f"--step: {path} has no checkpoint of step {step}; it has {steps}")
    raise ConfigError(f"{path}: neither a checkpoint nor a run with a complete one in its checkpoints/")


def _located(path: str | Path) -> Path:
    """Returns the absolute path of a run or a checkpoint; links to one are followed, a run's own (to its folder
    `checkpoints`, to one of its steps) are not."""
    named = Path(os.path.abspath(path))
    while named.is_symlink() and named.exists() and not (named / "checkpoints").is_dir():
        if named.parent.name == "checkpoints" and named.name.startswith("step-"):
            break
        named = Path(os.path.abspath(named.parent / os.readlink(named)))
    return named


def run_config(run: Path) -> Config:
    """Returns the config of the run in the folder `run`. Raises ConfigError."""
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{file}: not found; keep a checkpoint in its run's folder, or {NAME_MODEL}")
    try:
        return Config.model_validate(read_yaml(file, str(file)))
    except ValidationError as error:
        raise ConfigError(f"{file}: not the config of a run: {on_one_line(str(error), 500)}") from None


def open_checkpoint(
    path: str | Path, model: Path | None = None
) -> tuple[MegatronFolder | MergedFolder, ModelSpec, Path]:
    """Returns (tensors, spec, folder of config.json and tokenizer, which has the base of adapters). `path`: a folder
    that `hf2mcore` wrote, a run, its checkpoint, or any other folder in Megatron's torch_dist format. `model`: that
    folder; None: `path` if it has a config.json, else the `model.path` of its run. Raises ConfigError if a file is
    missing, ValueError if the tensors are damaged or are not those of the model.
    """
    checkpoint, family = Path(path), None
    in_run = _located(checkpoint).parent.name == "checkpoints" and not (checkpoint / "config.json").is_file()
    if in_run or not is_torch_dist(checkpoint):
        checkpoint = find_checkpoint(path)[1]
    has_manifest = (checkpoint / MANIFEST_FILE).is_file()
    if has_manifest and str(read_manifest(checkpoint)["model"].get("family")).startswith("bridge:"):
        raise ConfigError(
            f"{checkpoint}: a checkpoint of model.source: bridge is not converted; use the Hugging Face folder that "
            "its run writes: RUN/hf (written at its end; checkpoint.export_hf: every writes one with each save), for "
            "`eval` with model.source=bridge"
        )
    if model is None and (checkpoint / "config.json").is_file():
        model = checkpoint
    elif model is None:
        if _located(checkpoint).parent.name != "checkpoints":
            raise ConfigError(f"{path}: no config.json in it, and it is not in the folder of a run; {NAME_MODEL}")
        config = run_config(_located(checkpoint).parents[1]).model
        model, family = Path(config.path), config.family
        if not model.is_dir():
            here = "" if model.is_absolute() else "call this where the run was started, or "
            raise ConfigError(f"{path}: no folder {model} here, which the run's model.path names; {here}{NAME_MODEL}")
    spec = load_model_config(model, family)
    adapts = has_manifest and read_lora(checkpoint) is not None
    folder = MergedFolder(checkpoint, model, spec) if adapts else MegatronFolder(checkpoint, spec)
    if not verify(checkpoint):
        print(f"{checkpoint}: {UNVERIFIED}", file=sys.stderr)
    return folder, spec, model


def hf2mcore(source: Path, out: Path) -> None:
    """Writes the Hugging Face folder `source` as a Megatron checkpoint that any layout loads, with config.json and
    tokenizer beside it. Raises ConfigError or ValueError if it cannot be converted or `out` cannot be used, OSError if
    writing fails."""
    spec = load_model_config(source)
    folder = SafetensorsFolder(source, spec)
    with _aside(out) as unfinished:
        write_megatron(spec, folder.get, unfinished)
        stored = ", ".join(sorted({str(folder.dtype(name)).removeprefix("torch.") for name in folder.names}))
        contents = {"step": None, "model": spec.dimensions(), "dtype": stored, "layout": None}
        write_manifest(unfinished, contents)
        copy_companions(source, unfinished)  # not in the manifest: users edit them


def mcore2hf(source: str | Path, out: Path, model: Path | None = None) -> None:
    """Writes a Megatron checkpoint (as `open_checkpoint` finds it) as a Hugging Face folder; raises as `hf2mcore`."""
    folder, spec, model = open_checkpoint(source, model)
    shapes = huggingface_shapes(spec)
    tensors = {name: (folder.dtype(name), shapes[name]) for name in folder.names}
    sizes = {name: nbytes(*what) for name, what in tensors.items()}
    files = cut(list(tensors), sizes, FILE_BYTES)
    with _aside(out) as unfinished:
        file_of = {}
        for number, names in enumerate(files, 1):
            file = SINGLE_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_file(unfinished / file, {name: tensors[name] for name in names}, folder.get)
            file_of |= dict.fromkeys(names, file)
        if len(files) > 1:
            write_index(unfinished, file_of, sum(sizes.values()))
        parent = _located(folder.path).parent
        template = parent.parent / CHAT_TEMPLATE_FILE  # the run trained with it
        trained = parent.name == "checkpoints" and template.is_file()
        copy_companions(model, unfinished, template if trained else None)
        dtypes = {str(dtype).removeprefix("torch.") for dtype, _ in tensors.values()}
        if len(dtypes) == 1:
            set_dtype(unfinished, dtypes.pop())


def mcore2peft(source: str | Path, out: Path, model: Path | None = None) -> None:
    """Writes the adapters of a LoRA checkpoint as a folder for `peft`; raises as `hf2mcore`."""
    folder, _, model = open_checkpoint(source, model)
    if not isinstance(folder, MergedFolder):
        raise ConfigError(f"{folder.path}: no LoRA checkpoint; `convert mcore2hf` writes the model")
    with _aside(out) as unfinished:
        write_peft(folder, str(Path(model).resolve()), unfinished)


@contextlib.contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """Yields a new folder beside `out`. It is synced to disk and renamed to `out` if all goes well, and removed
    otherwise, after Ctrl-C, too. Raises ConfigError if `out` exists or cannot be written."""
    if out.exists():
        raise ConfigError(f"{out}: is there already; name another folder")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{unfinished}: another conversion writes it, or was killed and left it; remove it") from None
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield unfinished
        sync_folder(unfinished)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
