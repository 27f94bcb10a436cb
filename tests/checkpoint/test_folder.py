"""Checkpoint folders on disk: what is found complete, whatever was cut off, removed or damaged."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from dynamo_megatron.checkpoint.folder import (
    choose_checkpoint,
    complete_checkpoints,
    fault,
    file_checksum,
    latest_checkpoint,
    publish,
    read_manifest,
    read_state,
    unfinished_folder,
    verify,
    write_state,
)

FILES = {".metadata": b"m", "__0_0.distcp": b"data of rank 0", "__1_0.distcp": b"data", "state.json": b"{}"}
CONTENTS = {"model": {"family": "qwen2"}, "dtype": "float32", "layout": {"ranks": 2}}
DISK_CALLS = ("open", "fsync", "mkdir", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for the end of the process."""


def save(root: Path, step: int, keep_last: int = 1, say=print) -> Path:
    aside = unfinished_folder(root, step)
    for name, content in FILES.items():
        (aside / name).write_bytes(content)
    checksums = {name: file_checksum(aside / name) for name in ("__0_0.distcp", "__1_0.distcp")}
    return publish(aside, step, CONTENTS, checksums, keep_last, say)


def steps(root: Path) -> list[int]:
    return [step for step, _ in complete_checkpoints(root)]


def test_the_last_ones_are_kept_with_a_manifest_of_their_files(tmp_path):
    for step in (3, 6, 9, 1_000_000):
        folder = save(tmp_path, step, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000009", "step-1000000"]
    manifest = read_manifest(folder)
    assert manifest["files"] == {name: len(content) for name, content in FILES.items()}
    assert manifest["checksums"] == {name: xxhash.xxh3_128_hexdigest(content) for name, content in FILES.items()}
    assert manifest["step"] == 1_000_000 and manifest["model"] == {"family": "qwen2"}


def name_file(folder: Path, file: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"files": {file: 6}}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp: missing"),
        (lambda f: os.truncate(f / "__0_0.distcp", 5), "__0_0.distcp: 5 bytes instead of 14"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json: No such file or directory"),
        (lambda f: os.truncate(f / "manifest.json", 20), "manifest.json: "),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json: not a checkpoint's manifest"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json: not a JSON object"),
        (lambda f: name_file(f, "../../outside"), "manifest.json: not a checkpoint's manifest"),
        (lambda f: shutil.copy(f.with_name("step-000003") / "manifest.json", f), "of step 3, the folder was renamed"),
    ],
)
def test_a_damaged_one_is_not_chosen(tmp_path, damage, why):
    older, newer = save(tmp_path, 3, keep_last=2), save(tmp_path, 6, keep_last=2)
    damage(newer)
    assert why in fault(newer) and "\n" not in fault(newer)
    assert latest_checkpoint(tmp_path) == (3, older)
    said = []
    assert choose_checkpoint(tmp_path, said.append) == (3, older)
    assert said == [f"warning: the checkpoint of step 6 is damaged: {fault(newer)}; going on from step 3"]
    save(tmp_path, 6, keep_last=2)  # the run comes to this step again; a damaged one does not count among those kept
    assert steps(tmp_path) == [3, 6]


def refusal(folder: Path, *ranks: int) -> str:
    """What `verify` says; nothing where the bytes are those that were saved."""
    try:
        verify(folder, *ranks)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", list(FILES))
def test_a_flipped_bit_in_any_file_is_found_by_the_one_process_that_reads_it(tmp_path, flip, name):
    first = save(tmp_path, 3, keep_last=2)
    folder = save(tmp_path, 6, keep_last=2)
    assert verify(folder) and not verify(tmp_path)
    for one in (first, folder):
        flip(one / name)
    assert fault(folder) is None, "the size tells nothing"
    why = refusal(folder)
    assert why.startswith(f"{folder / name}: its bytes are not those that were saved (XXH3 ") and "\n" not in why
    assert "; restore it from a copy" in why
    for ranks in (2, 3, 7):
        said = [refusal(folder, rank, ranks) for rank in range(ranks)]
        assert sorted(said) == [""] * (ranks - 1) + [why]


def test_an_old_one_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    save(tmp_path, 3)
    said, rmdir = [], os.rmdir

    def stuck(path, **options):
        if Path(path).name == ".step-000003.removed":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))  # a file on NFS that someone reads
        rmdir(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", stuck)
        save(tmp_path, 6, say=said.append)
        assert steps(tmp_path) == [6]
    (line,) = said
    assert line.startswith(f"warning: the old checkpoint {tmp_path / 'step-000003'} was not removed: ")
    save(tmp_path, 12)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000012"]


def test_a_file_that_rank_0_does_not_see_is_not_left_out(tmp_path):
    aside = unfinished_folder(tmp_path, 3)
    (aside / "__0_0.distcp").write_bytes(b"data")
    with pytest.raises(OSError, match=r"__1_0.distcp: written by a rank, but not in the folder as rank 0 sees it"):
        publish(aside, 3, CONTENTS, {"__0_0.distcp": "0", "__1_0.distcp": "1"}, 1, print)
    assert steps(tmp_path) == []


def test_a_kill_between_any_two_calls_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    """Killed after the first call that reaches the disk, after the second, and so on; then the run goes on."""
    begun = tmp_path / "begun"
    save(begun, 3)
    outcomes = []
    for last in range(1000):
        root = tmp_path / f"killed-{last}"
        shutil.copytree(begun, root)
        left = last
        with monkeypatch.context() as patched:
            for name in DISK_CALLS:

                def counted(call, *arguments, **options):
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return call(*arguments, **options)

                patched.setattr(os, name, functools.partial(counted, getattr(os, name)))
            try:
                save(root, 6)
            except Killed:
                pass
            else:
                break
        outcomes.append(steps(root))
        assert outcomes[-1] in ([3], [3, 6], [6])
        save(root, 9)
        assert steps(root) == [9] and [p.name for p in root.iterdir()] == ["step-000009"]
    assert [3] in outcomes and [6] in outcomes and len(outcomes) > 15


def test_everything_is_on_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor):
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(source, target):
        done.append(f"{Path(source).name} -> {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    save(tmp_path / "checkpoints", 3)
    aside = ".step-000003.unfinished"
    manifest = [".manifest.json.tmp", ".manifest.json.tmp -> manifest.json", aside]
    assert done == [*sorted(FILES), aside, *manifest, f"{aside} -> step-000003", "checkpoints"]


def test_the_state_of_a_run_comes_back(tmp_path):
    state = {"stream": {"position": 3}, "allocator": {"prompt_ids": ["a"], "trials": np.array([0.1, np.nan])}}
    write_state(tmp_path, state)
    assert str(read_state(tmp_path)) == str(state | {"allocator": {"prompt_ids": ["a"], "trials": [0.1, np.nan]}})
