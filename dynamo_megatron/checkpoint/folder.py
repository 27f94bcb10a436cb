"""The checkpoint folders of a run. Whether one is complete is decided by its content, not by a pointer file.

`checkpoints/step-NNNNNN` has Megatron's torch_dist files, rank 0's `state.json`, and `manifest.json`. The manifest
lists all files with their sizes and checksums, and has the model, layout and step of the checkpoint. A checkpoint is
written under a hidden name. Its data is on disk before the manifest is written, and the manifest before the folder gets
its final name.

Checksums are XXH3 of 128 bits over a whole file, as `xxhsum -H2` prints them: each rank hashes its files
once they are written, and a load reads every file once more. They detect flipped bits and mixed-up files, but not an
attacker's changes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.whole_files import replacing, sync_to_disk

UNVERIFIED = "saved without checksums, so that its bytes are not verified"
MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"  # of the torch_dist format
STATE_FILE = "state.json"
LARGEST_STATE = 8 << 30  # bytes
MANIFEST = {"step", "model", "dtype", "layout", "files", "checksums"}


def is_torch_dist(path: str | Path) -> bool:
    """Returns True where the folder has a checkpoint in Megatron's torch_dist format."""
    return (Path(path) / METADATA_FILE).is_file()


def file_checksum(file: Path) -> str:
    """The file's checksum in hexadecimal digits. Raises OSError."""
    with open(file, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all folders with a checkpoint's name, complete or not, oldest first."""
    found = ((_named_step(p), p) for p in root.glob("step-*"))
    return sorted((step, p) for step, p in found if step is not None)


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first."""
    return [(step, folder) for step, folder in checkpoint_folders(root) if fault(folder) is None]


def latest_checkpoint(root: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest complete checkpoint; None where there is none."""
    return next((found for found in reversed(checkpoint_folders(root)) if fault(found[1]) is None), None)


def choose_checkpoint(root: Path, say: Callable[[str], None]) -> tuple[int, Path] | None:
    """(step, folder) of the checkpoint that a run resumes from, the newest complete one; None where there is none.

    `say` gets a line for every newer, damaged checkpoint. Raises ValueError where all checkpoints are damaged: a run
    does not start from the beginning without being asked to.
    """
    damaged = []
    for step, folder in reversed(checkpoint_folders(root)):
        if (why := fault(folder)) is None:
            for line in damaged:
                say(f"warning: {line}; going on from step {step}")
            return step, folder
        damaged.append(f"the checkpoint of step {step} is damaged: {why}")
    if damaged:
        raise InputError(f"{root}: {damaged[0]}, and no other is complete; to start from step 0 move {root} away")
    return None


def fault(folder: Path) -> str | None:
    """The reason why a folder is not a complete checkpoint; None where it is one."""
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


def verify(folder: Path, rank: int = 0, ranks: int = 1) -> bool:
    """Compares the files with the checksums in the manifest. Returns False where there is no manifest, as in
    checkpoints of other programs.

    Each of `ranks` processes reads a share of the files, of about equal size. Raises ValueError that names a damaged
    file and what to do about it."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    manifest = read_manifest(folder)
    names = sorted(manifest["files"], key=lambda n: (-manifest["files"][n], n))[rank::ranks]
    wrong = None
    try:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(file_checksum, (folder / name for name in names)))
        for name, checksum in zip(names, found, strict=True):
            if checksum != (saved := manifest["checksums"].get(name)):
                wrong = f"{folder / name}: its bytes are not those that were saved (XXH3 {checksum}, saved {saved})"
    except OSError as error:
        wrong = f"{error.filename}: {error.strerror}"
    if wrong is not None:
        raise InputError(f"{wrong}; {instead_of(folder)}")
    return True


def instead_of(folder: Path) -> str:
    """What to do where the checkpoint `folder` is damaged, for messages."""
    if _named_step(folder) is None:
        return "copy or convert the model again"
    if any(other != folder for _, other in complete_checkpoints(folder.parent)):
        return f"restore it from a copy, or delete {folder}: its run then resumes from another checkpoint"
    return "restore it from a copy: its run has no other complete checkpoint"


def check_model(folder: Path, dimensions: Mapping[str, Any]) -> None:
    """Raises ValueError where the manifest belongs to a model with other `dimensions` (ModelSpec.dimensions)."""
    saved = read_manifest(folder)["model"]
    differ = [f"{k} {saved[k]} instead of {v}" for k, v in dimensions.items() if k in saved and saved[k] != v]
    if differ:
        raise InputError(f"{folder} is a checkpoint of another model: {', '.join(differ)}")


def write_manifest(
    folder: Path, contents: Mapping[str, Any], checksums: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Writes manifest.json with `contents` and the folder's files, which are synced to disk before.

    `checksums`: those of the files that ranks have hashed; the other files are hashed here.
    Raises OSError, also where a file of `checksums` is not in the folder."""
    files = sync_folder(folder)
    if missing := sorted(checksums.keys() - files.keys()):  # a network file system may show others' files late
        raise OSError(f"{folder / missing[0]}: written by a rank, but not in the folder as rank 0 sees it")
    sums = {name: checksums.get(name) or file_checksum(folder / name) for name in files}
    with replacing(folder / MANIFEST_FILE, sync=True) as file:
        file.write(json.dumps({**contents, "files": files, "checksums": sums}, indent=1).encode())


def sync_folder(folder: Path) -> dict[str, int]:
    """Waits until the files of a folder are on disk. Returns their sizes in bytes, by name."""
    files = {}
    for file in sorted(folder.iterdir()):
        sync_to_disk(file)
        files[file.name] = file.stat().st_size
    sync_to_disk(folder)
    return files


def read_manifest(folder: Path) -> dict[str, Any]:
    """{"step", "model", "dtype", "layout", "files": {name: bytes}, "checksums": {name: XXH3}}, and of a policy "lora"
    and "frozen": {folder: digest}. Raises ValueError where the manifest is missing or malformed, or names a file of
    another folder."""
    manifest = plain_json.read_object(folder / MANIFEST_FILE)
    if not manifest.keys() >= MANIFEST or any(Path(name).name != name for name in manifest["files"]):
        raise InputError(f"{folder / MANIFEST_FILE}: not a checkpoint's manifest")
    return manifest


def write_state(folder: Path, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes rank 0's state of a checkpoint: parts whose values are plain data or arrays, which become lists. Raises
    OSError."""
    with replacing(folder / STATE_FILE) as file:
        file.write(json.dumps(state, default=lambda array: array.tolist()).encode())


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """The state that `write_state` has written. Raises ValueError where it cannot be read."""
    file = folder / STATE_FILE
    return plain_json.parse(plain_json.read_bytes(file, LARGEST_STATE), str(file), nan=True)  # statistics may be NaN


def unfinished_folder(root: Path, step: int) -> Path:
    """Creates an empty folder to write the checkpoint of `step` into. Removes what earlier saves left, where possible.
    Raises OSError where the folder cannot be created."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = root / f".step-{step:06d}.unfinished"
    aside.mkdir(parents=True)
    return aside


def publish(
    aside: Path,
    step: int,
    contents: Mapping[str, Any],
    checksums: Mapping[str, str],
    keep_last: int,
    say: Callable[[str], None],
) -> Path:
    """Turns `aside`, which has all files, into the checkpoint of `step`, then removes all but the newest `keep_last`
    complete checkpoints. `contents` and `checksums` go into the manifest (`write_manifest`). Returns the checkpoint's
    folder. Raises OSError where the checkpoint could not be made; `say` gets a line for an old one that cannot be
    removed."""
    write_manifest(aside, {"step": step, **contents}, checksums)
    folder = aside.with_name(f"step-{step:06d}")
    damaged = _hide(folder) if folder.exists() else None  # this run did not resume from it, so it is damaged
    aside.rename(folder)
    sync_to_disk(folder.parent)
    if damaged is not None:
        shutil.rmtree(damaged, ignore_errors=True)
    for _, old in complete_checkpoints(folder.parent)[:-keep_last]:
        try:
            shutil.rmtree(_hide(old))
        except OSError as error:
            say(f"warning: the old checkpoint {old} was not removed: {error}")
    return folder


def _hide(folder: Path) -> Path:
    """Renames a checkpoint to a hidden name before its removal, so that a kill leaves no partial checkpoint."""
    return folder.rename(folder.with_name(f".{folder.name}.removed"))


def _named_step(folder: Path) -> int | None:
    found = re.fullmatch(r"step-(\d{6,})", folder.name)
    return int(found[1]) if found else None
