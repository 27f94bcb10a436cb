"""Standard output that takes no more ends a command with one line: a full disk, a reader that has ended."""

import os
import subprocess
import sys

import pytest

FULL, LEFT = "standard output: No space left on device\n", "standard output: Broken pipe\n"


@pytest.mark.parametrize(
    ("words", "full", "left"),
    [
        (("configs",), (1, FULL), (0, "")),
        (("train", "--help"), (1, FULL), (0, "")),
        (("compare", "compare/sums_task", "--dry-run"), (1, FULL), (1, LEFT)),  # more than one buffer of text
    ],
)
def test_a_full_disk_and_a_reader_that_has_ended_are_one_line_at_most(words, full, left):
    assert ended(words, os.open("/dev/full", os.O_WRONLY)) == full
    reader, writer = os.pipe()
    os.close(reader)
    assert ended(words, writer) == left


def test_standard_output_may_be_closed_from_the_start():
    assert ended(("configs",), os.open(os.devnull, os.O_WRONLY), "sh", "-c", 'exec "$@" >&-', "sh") == (0, "")


def ended(words: tuple[str, ...], stdout: int, *shell: str) -> tuple[int, str]:
    """The exit code and the standard error of a command that prints to `stdout`, which is closed here."""
    command = [*shell, sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
    try:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(stdout)
    return done.returncode, done.stderr
