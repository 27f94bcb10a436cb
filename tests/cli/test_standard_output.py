"""A reader of standard output that ends early, such as a pager, or a closed one ends a command without a traceback."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("configs",), 1),
        (("train", "--help"), 0),  # argparse takes no notice
        (("compare", "compare/sums_task", "--dry-run"), 1),  # more than one buffer of text
    ],
)
def test_a_reader_that_has_ended_is_no_traceback(words, code):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")


def test_closed_streams_are_no_fault():
    command = f"{sys.executable} -P -m dynamo_megatron.cli configs <&- >&- 2>&-"
    assert subprocess.run(command, shell=True, timeout=120).returncode == 0


def test_a_folder_for_temporary_files_that_cannot_be_used_is_named(tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path / "absent")}
    command = f"{sys.executable} -P -m dynamo_megatron.cli configs"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith(f"TMPDIR: {tmp_path}/absent cannot be written to")
