"""The checkpoint folders of a run on disk: which are complete is found by what they hold, never by a pointer.

`checkpoints/step-NNNNNN` holds Megatron's torch_dist files, rank 0's `state.json`, and `manifest.json`, which lists all
of them with their sizes and says what model, layout and step they are of. A checkpoint is written under a hidden name;
its data is on disk before the manifest is, and the manifest before the folder takes its name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
MANIFEST = {"step": int | None, "model": dict, "dtype": str, "layout": dict | None, "files": dict}


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that have a checkpoint's name, complete or not, oldest first."""
    found = ((_named_step(p), p) for p in (root.iterdir() if root.is_dir() else ()))
    return sorted((step, p) for step, p in found if step is not None)


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints that are complete, oldest first."""
    return [(step, folder) for step, folder in checkpoint_folders(root) if fault(folder) is None]


def latest_checkpoint(root: Path) -> tuple[int, Path] | None:
    """The newest complete one."""
    found = reversed(checkpoint_folders(root))
    return next(((step, folder) for step, folder in found if fault(folder) is None), None)


def choose_checkpoint(root: Path, say: Callable[[str], None]) -> tuple[int, Path] | None:
    """(step, folder) that a run goes on from: the newest complete one; None where there is none of any kind.

    `say` gets a line for every newer one. Raises ValueError where there are only damaged ones: a run does not start
    from the beginning unasked.
    """
    damaged = []
    for step, folder in reversed(checkpoint_folders(root)):
        if (why := fault(folder)) is None:
            for line in damaged:
                say(f"warning: {line}; going on from step {step}")
            return step, folder
        damaged.append(f"the checkpoint of step {step} is damaged: {why}")
    if damaged:
        raise ValueError(f"{root}: {damaged[0]}, and no other is complete; to start from step 0 move {root} away")
    return None


def fault(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint; None where it is."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest["step"] != (named := _named_step(folder)) and None not in (manifest["step"], named):
        return f"{folder / MANIFEST_FILE}: of step {manifest['step']}, the folder was renamed"
    for name, size in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{folder / name}: missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{folder / name}: {found} bytes instead of {size}"
    return None


def check_model(folder: Path, dimensions: Mapping[str, Any]) -> None:
    """Raises ValueError where the manifest is of a model with other `dimensions` (ModelSpec.dimensions)."""
    saved = read_manifest(folder)["model"]
    differ = [f"{k} {saved[k]} instead of {v}" for k, v in dimensions.items() if k in saved and saved[k] != v]
    if differ:
        raise ValueError(f"{folder} is a checkpoint of another model: {', '.join(differ)}")


def write_manifest(folder: Path, contents: Mapping[str, Any], written: Collection[str] = ()) -> None:
    """Writes manifest.json: `contents` and the files that are in the folder, which are on disk before it is.

    Raises OSError, also where the folder does not list a file of those `written`."""
    files = sync_folder(folder)
    if missing := sorted(set(written) - files.keys()):  # a network file system may show another machine's files late
        raise OSError(f"{folder / missing[0]}: written by a rank, but not in the folder as rank 0 sees it")
    with open(folder / MANIFEST_FILE, "w", encoding="utf-8") as file:
        json.dump({**contents, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def sync_folder(folder: Path) -> dict[str, int]:
    """Waits until the files of a folder are on disk; returns their sizes, bytes."""
    files = {}
    for file in sorted(folder.iterdir()):
        _sync(file)
        files[file.name] = file.stat().st_size
    _sync(folder)
    return files


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"step", "model", "dtype", "layout", "files": {name: bytes}}. Raises ValueError where it cannot be read."""
    manifest = _read_json(folder / MANIFEST_FILE)
    for key, kind in MANIFEST.items():
        if not isinstance(manifest, dict) or key not in manifest or not isinstance(manifest[key], kind):
            raise ValueError(f"{folder / MANIFEST_FILE}: not a checkpoint's manifest ({key} is missing or malformed)")
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    """Rank 0's state of a checkpoint. Raises ValueError where it cannot be read."""
    return _read_json(folder / STATE_FILE)


def unfinished_folder(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. Removes what earlier saves left, as far as it can.

    Raises OSError where the folder cannot be made."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = root / f".step-{step:06d}.unfinished"
    aside.mkdir(parents=True)
    return aside


def publish(
    aside: Path,
    step: int,
    contents: Mapping[str, Any],
    written: Collection[str],
    keep_last: int,
    say: Callable[[str], None],
) -> Path:
    """Makes `aside`, which holds all files, those `written` by ranks among them, the checkpoint of `step`, then removes
    the oldest complete ones beyond `keep_last`. `contents` goes into the manifest. Returns the checkpoint's folder.

    Raises OSError where the checkpoint is not there; `say` gets a line for an old one that cannot be removed."""
    write_manifest(aside, {"step": step, **contents}, written)
    folder = aside.with_name(f"step-{step:06d}")
    damaged = _hide(folder) if folder.exists() else None  # this run was not resumed from it
    aside.rename(folder)
    _sync(folder.parent)
    if damaged is not None:
        shutil.rmtree(damaged, ignore_errors=True)
    for _, old in complete_checkpoints(folder.parent)[:-keep_last]:
        try:
            shutil.rmtree(_hide(old))
        except OSError as error:
            say(f"warning: the old checkpoint {old} was not removed: {error}")
    return folder


def _hide(folder: Path) -> Path:
    """Gives a checkpoint that goes a hidden name, so that a kill leaves no half of one under its own."""
    return folder.rename(folder.with_name(f".{folder.name}.removed"))


def _named_step(folder: Path) -> int | None:
    found = re.fullmatch(r"step-(\d{6,})", folder.name)
    return int(found[1]) if found else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
