"""Files that take their name when they are whole."""

import os

import pytest

from dynamo_megatron.runtime.whole_files import naming, replacing


def test_a_writer_that_fails_leaves_the_older_file_and_nothing_else(tmp_path):
    file = tmp_path / "state"
    file.write_text("older")
    with pytest.raises(OSError, match=f"full.*{file}"), replacing(file) as whole:
        whole.write(b"half")
        raise OSError(28, "the disk is full")
    assert file.read_text() == "older" and os.listdir(tmp_path) == ["state"]
    with pytest.raises(OSError, match=str(tmp_path)), naming(tmp_path / "file"), open("/dev/full", "wb") as full:
        full.write(b"x")
        full.flush()


@pytest.mark.parametrize(("mode", "permissions"), [(0o666, 0o640), (0o600, 0o600)])
def test_what_a_kill_has_left_is_replaced_and_a_link_is_not_followed(tmp_path, mode, permissions):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for link in ("state", ".state.tmp"):
        (tmp_path / link).symlink_to(victim)
    umask = os.umask(0o027)
    try:
        with replacing(tmp_path / "state", mode, sync=True) as whole:
            whole.write(b"new")
    finally:
        os.umask(umask)
    assert victim.read_text() == "untouched" and (tmp_path / "state").read_text() == "new"
    assert (tmp_path / "state").stat().st_mode & 0o777 == permissions
    assert sorted(os.listdir(tmp_path)) == ["state", "victim"]
