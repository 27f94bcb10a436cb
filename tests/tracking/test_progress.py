"""What a terminal shows of a run: the live line, and the line of a step."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import time

from dynamo_megatron.tracking.progress import Progress


def test_a_run_in_a_terminal(monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    terminal = os.fdopen(theirs, "w")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal)
    progress = Progress(100)
    progress.phase("loading data", unit="rows")
    progress.count(12000)
    progress.phase("starting server")
    progress.start(11)
    for step in (12, 13):
        progress.phase("generate", 256)
        time.sleep(0.2)  # tqdm draws ten times a second at most
        progress.count(180, 6000)
        progress.say(f"step {step} is done")
        progress.step_done(step)
    progress.phase("save")
    progress.close()
    progress.close()
    terminal.close()
    written = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side is closed
        while more := os.read(ours, 65536):
            written += more
    os.close(ours)
    states = [state.rstrip() for state in written.decode().replace("\n", "\r").split("\r")]
    assert max(map(len, states)) <= 70  # nothing wraps
    assert "loading data 0 rows" in states and "after step 13 of 100: save" in states
    generating = "after step 12 of 100: generate 180/256"
    assert any(state.startswith(generating) and "6,000 tokens" in state for state in states)
    assert "step 12 is done" in states and "step 13 is done" in states


def test_a_file_has_a_line_for_each_phase_of_the_start(capsys):
    progress = Progress(100)
    progress.phase("loading data", unit="rows")
    progress.count(12000)
    progress.start()
    progress.phase("generate", 256)
    progress.close()
    assert re.fullmatch(r"loading data 12,000 rows: \d+\.\d s\n", capsys.readouterr().out)
