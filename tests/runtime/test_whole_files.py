"""Files that take their name when they are whole, in a folder where somebody else may put links."""

import contextlib
import os
import resource
from pathlib import Path

import pytest

from dynamo_megatron.checkpoint.folder import MANIFEST_FILE, write_manifest
from dynamo_megatron.config import Config
from dynamo_megatron.evaluation.results import write_results
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.rollout.servers import announcements
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.whole_files import replacing
from dynamo_megatron.tracking.metrics import StepLog


def config(folder: Path) -> Config:
    return Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(folder))


def discard(folder: Path) -> None:
    store = RolloutStore(folder)
    file = step_file(folder, 1)
    if not file.exists():
        file.write_bytes(b"")
    store.discard(1, ["000001-0000-000"])


WRITERS = {
    "config.yaml": lambda folder: OutputDir(config(folder)).take_over(0),
    "chat_template.jinja": lambda folder: OutputDir(config(folder)).keep_chat_template("{{ messages }}"),
    "eval/step-000001.jsonl": lambda folder: write_results(folder / "eval" / "step-000001.jsonl", []),
    "rollouts/step-000001.jsonl.zst": discard,
    "servers/node.json": lambda folder: announcements._write(folder / "servers" / "node.json", {"api_key": "k"}),
    MANIFEST_FILE: lambda folder: write_manifest(folder, {"step": 1}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_link_in_the_place_of_a_file_written_aside_is_followed(tmp_path, name):
    """All names that the aside of a file has or had, and the file's own, are links to a file of somebody else."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    for link in (path.with_suffix(".tmp"), path.with_name(f".{path.name}.tmp")):
        link.symlink_to(victim)
    if not name.startswith(("rollouts", "config")):  # which are read, too
        path.symlink_to(victim)
    WRITERS[name](tmp_path / "run")
    assert victim.read_text() == "untouched"
    assert path.is_file() and not path.is_symlink()
    assert not path.with_name(f".{path.name}.tmp").exists()


def append(folder: Path) -> None:
    StepLog(folder / "metrics.jsonl", keep_to=0).write([{"step": 1, "x": "x" * 99}])


@contextlib.contextmanager
def no_room():
    """No file of this process may become larger than 10 bytes: a write fails as on a full disk, at the system call. No
    fixture: pytest writes its own line before a fixture ends, to a file perhaps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("name", "writer"),
    [("metrics.jsonl", append), (MANIFEST_FILE, WRITERS[MANIFEST_FILE]), ("config.yaml", WRITERS["config.yaml"])],
)
def test_a_file_for_which_there_is_no_room_is_named(tmp_path, name, writer):
    with no_room(), pytest.raises((OSError, ValueError), match=str(tmp_path / name)):
        writer(tmp_path)


def test_a_lock_is_not_taken_on_the_target_of_a_link(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"output_dir: {tmp_path}: Too many levels of symbolic links"):
        OutputDir(config(tmp_path)).claim()
    assert not (tmp_path / "elsewhere").exists()


def test_a_writer_that_fails_leaves_the_older_file_and_nothing_else(tmp_path):
    file = tmp_path / "state"
    file.write_text("older")
    with pytest.raises(OSError, match="full"), replacing(file) as whole:
        whole.write(b"half")
        raise OSError("the disk is full")
    assert file.read_text() == "older" and os.listdir(tmp_path) == ["state"]


def test_a_link_that_comes_between_is_refused(tmp_path, monkeypatch):
    """The aside is made anew or not at all: what stands there after the leftover was removed is not opened."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
    (tmp_path / ".state.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(tmp_path / "state") as whole:
        whole.write(b"x")
    assert victim.read_text() == "untouched"


def test_the_permissions_are_those_that_were_asked_for(tmp_path):
    umask = os.umask(0o027)
    try:
        for name, mode in (("open", 0o666), ("secret", 0o600)):
            with replacing(tmp_path / name, mode) as whole:
                whole.write(b"x")
    finally:
        os.umask(umask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "secret")] == [0o640, 0o600]
