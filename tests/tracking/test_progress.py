"""The live line, in a pseudo-terminal and into files."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from dynamo_megatron.tracking.progress import wrapped

SLOW = 0.2  # seconds of a step in the programs below
# Before a program: its clock moves while it sleeps and at no other time, so that no load of the machine is shown.
CLOCK = """
import time
now = 1000.0
def sleep(seconds):
    global now
    now += seconds
time.sleep, time.monotonic = sleep, lambda: now
"""
RUN = f"""{CLOCK}
from dynamo_megatron.tracking.progress import Progress
progress = Progress(100)
progress.phase("starting server")
progress.start(11)
progress.phase("evaluate", 64)
progress.count(0, 0)
time.sleep({10 * SLOW})
for step in (12, 13):
    progress.phase("generate", 256)
    progress.count(100, 5000)
    time.sleep({SLOW})
    progress.count(180, 6000)
    progress.phase("update")
    progress.say(f"step {{step}} is done")
    progress.step_done(step, 0.25)
    progress.phase("save")
progress.close()
progress.close()
"""
EVALUATION = f"""{CLOCK}
from dynamo_megatron.tracking.progress import Progress
progress = Progress()
progress.phase("evaluate", 512)
progress.count(0, 0)
time.sleep({SLOW})
progress.count(128, 4000)
progress.close()
"""


def start_in_terminal(program: str, width: int) -> tuple[subprocess.Popen, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=theirs, stderr=theirs)
    os.close(theirs)
    return process, ours


def read_all(ours: int) -> str:
    """What was written to the terminal until its last writer closed it."""
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            os.close(ours)
            return written.decode()


def in_terminal(program: str, width: int) -> str:
    process, ours = start_in_terminal(program, width)
    written = read_all(ours)
    assert process.wait() == 0, written
    return written


def rewritings(written: str, width: int) -> list[str]:
    """Every state of the live line. Asserts that nothing wraps and that no control character but \\r and \\n occurs."""
    pieces = written.replace("\n", "\r").split("\r")
    assert all(piece.isprintable() for piece in pieces)
    assert max(map(len, pieces)) < width
    return [piece.rstrip() for piece in pieces if piece.strip()]


def left_on_screen(written: str) -> list[str]:
    rows = []
    for row in written.split("\n"):
        cells: list[str] = []
        for piece in row.split("\r"):
            cells[: len(piece)] = piece
        rows.append("".join(cells).rstrip())
    return rows


def first_with(states: list[str], *words: str) -> str:
    return next(state for state in states if all(word in state for word in words))


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_in_a_terminal(width):
    written = in_terminal(RUN, width)
    states = rewritings(written, width)
    assert first_with(states, "starting server").startswith("starting server ")
    assert first_with(states, "evaluate").startswith("step  11/100  evaluate  0/64 ")
    assert first_with(states, "generate").startswith("step  12/100  generate   0/256 ")
    speed = first_with(states, "180/256", "tok/s")
    assert int(speed.split(" tok/s")[0].split()[-1].replace(",", "")) == 1000 / SLOW  # not 6000: 5000 were there
    update = first_with(states, "update")
    assert update.startswith("step  12/100  update ") and "reward" not in update and "tok/s" not in update
    assert "reward  0.250" in first_with(states, "step  13/100  generate")
    assert first_with(states, "save").startswith("step  12/100  save ")
    assert left_on_screen(written) == ["step 12 is done", "step 13 is done", ""]


def test_the_eta_is_of_the_steps_left_without_the_evaluation_before_them():
    states = rewritings(in_terminal(RUN, 100), 100)
    assert "ETA" not in first_with(states, "12/100  update")  # not known yet: the phase's own seconds
    assert " 0 s" in first_with(states, "12/100  update")
    minutes, seconds = first_with(states, "13/100").split("ETA")[1].split()[0].split(":")
    assert 60 * int(minutes) + int(seconds) == int(88 * SLOW)


def test_an_evaluation_after_the_last_step_has_its_own_eta():
    program = f"""{CLOCK}
from dynamo_megatron.tracking.progress import Progress
progress = Progress(1)
progress.start()
progress.step_done(1)
progress.phase("evaluate", 100)
progress.count(0, 0)
time.sleep({5 * SLOW})
progress.count(10, 500)
progress.close()
"""
    last = first_with(rewritings(in_terminal(program, 80), 80), "10/100")
    minutes, seconds = last.split("ETA")[1].split()[0].split(":")
    assert 60 * int(minutes) + int(seconds) == 45 * SLOW


@pytest.mark.parametrize("width", [80, 120])
def test_fields_stay_in_their_columns_and_the_bar_takes_what_is_left(width):
    states = [s for s in rewritings(in_terminal(RUN, width), width) if s.startswith("step  1")]
    assert len({state.index("ETA") for state in states if "ETA" in state}) == 1
    bars = [len(state) for state in states if state.endswith("|")]
    assert bars and set(bars) == {width - 1}


def test_an_evaluation_shows_its_count_and_the_time_left_of_it():
    states = rewritings(in_terminal(EVALUATION, 80), 80)
    last = first_with(states, "128/512")
    assert last.startswith("evaluate 128/512 ") and "ETA    00:00" in last and "step" not in last
    bar = last.split("|")[1]
    assert 0.2 < (len(bar.rstrip()) / len(bar)) < 0.3


def test_a_terminal_made_narrower_gets_lines_that_fit():
    program = """
import fcntl, struct, sys, termios
from dynamo_megatron.tracking.progress import Progress
progress = Progress(100)
progress.start()
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
progress.phase("generate", 256)
progress.close()
"""
    written = in_terminal(program, 120)
    wide, narrow = written.split("generate")[0], written[written.index("generate") :]
    assert max(map(len, wide.split("\r"))) == 119
    assert max(map(len, narrow.split("\r"))) <= 59


def test_a_killed_run_leaves_a_terminal_as_it_was():
    process, ours = start_in_terminal(RUN.replace("progress.close()", "import signal; signal.pause()"), 80)
    attributes = termios.tcgetattr(ours)
    written = ""
    while "evaluate" not in written:
        written += os.read(ours, 65536).decode(errors="replace")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert termios.tcgetattr(ours) == attributes
    assert "\x1b" not in written + read_all(ours)


def test_a_long_call_shows_its_seconds_and_a_count_of_rows():
    program = """
import time
from dynamo_megatron.tracking.progress import Progress
progress = Progress(100)
draw, drawn = progress._draw, []
progress._draw = lambda: drawn.append(draw())
progress.phase("loading data", unit="rows")
progress.count(12000)
while len(drawn) < 5:  # by these two calls, and three times by the timer
    time.sleep(0.01)
progress.phase("starting server")
progress.close()
"""
    states = rewritings(in_terminal(program, 80), 80)
    data = [state for state in states if state.startswith("loading data 12,000 rows")]
    seconds = [int(state.removeprefix("loading data 12,000 rows").removesuffix(" s")) for state in data]
    assert seconds[-1] >= 2 and seconds == sorted(seconds) and len(set(seconds)) > 1
    assert not any("ETA" in state for state in states)


def test_the_timer_and_the_calls_do_not_garble_the_line():
    program = """
import time
import dynamo_megatron.tracking.progress as module
module.REDRAW_EVERY = 0.0001
progress = module.Progress(1000)
progress.phase("generate", 2000)
for i in range(2000):
    progress.count(i)
    if i % 100 == 0:
        progress.say(f"line {i}")
progress.close()
"""
    written = in_terminal(program, 80)
    assert all(state.startswith(("generate", "line")) for state in rewritings(written, 80))
    assert left_on_screen(written) == [*(f"line {i}" for i in range(0, 2000, 100)), ""]


def test_files_get_a_line_for_each_phase_of_the_start(tmp_path):
    program = f"""{CLOCK}
from dynamo_megatron.tracking.progress import Progress
progress = Progress(2)
progress.phase("loading data", unit="rows")
progress.count(12000)
time.sleep(0.3)
progress.phase("starting server")
progress.start(0)
progress.phase("generate", 256)
progress.step_done(1)
progress.phase("save")
progress.close()
"""
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        subprocess.run([sys.executable, "-P", "-c", program], stdout=out, stderr=err, check=True)
    data, server = (tmp_path / "out").read_text().splitlines()
    assert (data, server) == ("loading data 12,000 rows: 0.3 s", "starting server: 0.0 s")
    assert (tmp_path / "err").read_bytes() == b""


def test_the_phases_of_an_evaluation_do_not_stand_before_its_table(tmp_path):
    program = f"""{CLOCK}
from dynamo_megatron.tracking.progress import Progress
progress = Progress()
progress.phase("loading tokenizer")
time.sleep({SLOW})
progress.phase("evaluate", 2)
progress.count(2)
progress.close()
print("| table |")
"""
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        subprocess.run([sys.executable, "-P", "-c", program], stdout=out, stderr=err, check=True)
    assert (tmp_path / "out").read_text() == "| table |\n"
    assert (tmp_path / "err").read_text() == "loading tokenizer: 0.2 s\n"


def test_files_get_only_what_is_said(tmp_path):
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        subprocess.run([sys.executable, "-P", "-c", RUN], stdout=out, stderr=err, check=True)
    assert (tmp_path / "out").read_bytes() == b"starting server: 0.0 s\nstep 12 is done\nstep 13 is done\n"
    assert (tmp_path / "err").read_bytes() == b""


def test_output_into_a_file_leaves_the_terminal_to_the_live_line(tmp_path):
    program = f"import sys; sys.stdout = open({str(tmp_path / 'out')!r}, 'w')\n" + RUN
    written = in_terminal(program, 80)
    assert (tmp_path / "out").read_text() == "step 12 is done\nstep 13 is done\n"
    assert "generate" in written and left_on_screen(written) == [""]


def test_text_is_wrapped_between_words_and_tables_are_not():
    table = "| a table | of a row that is longer than the width |"
    text = f"one two three four five\n{table}\n\nsix"
    assert wrapped(text, 11) == f"one two\n  three\n  four five\n{table}\n\nsix"
    assert wrapped(text, None) == text
