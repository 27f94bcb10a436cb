"""The file system that tests fill: it has its size, and it is gone after them."""

import os
from pathlib import Path

import pytest
from small_disk import mounting


def test_it_has_its_size_and_is_full_after_that(small_disk):
    with pytest.raises(OSError, match="No space left"), (small_disk / "file").open("wb", buffering=0) as file:
        for _ in range(3):
            assert file.write(bytes(1 << 19)) == 1 << 19


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_test_may_name_another_size(small_disk):
    room = os.statvfs(small_disk)
    assert room.f_blocks * room.f_frsize == 1 << 16


def test_it_is_unmounted_after_a_failure_too_and_while_a_file_is_open(tmp_path):
    folder = tmp_path / "disk"
    with pytest.raises(KeyError, match="the test"), mounting(folder, "64k") as mounted:
        if not mounted:
            pytest.skip("this user may not mount a tmpfs")
        file = (folder / "file").open("w")
        assert os.path.ismount(folder)
        raise KeyError("the test")
    assert not os.path.ismount(folder) and not list(folder.iterdir())
    file.close()


def test_without_the_right_to_mount_the_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(fake_mount(tmp_path)))
    with mounting(tmp_path / "disk", "64k") as mounted:
        assert not mounted and (tmp_path / "disk").is_dir()


def fake_mount(folder: Path) -> Path:
    """A folder whose `mount` refuses and which has no `umount`."""
    (folder / "mount").write_text("#!/bin/sh\nexit 32\n")
    (folder / "mount").chmod(0o755)
    return folder
