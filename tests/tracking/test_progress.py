"""What a terminal and a file show of a run: the live line, and the line of a step."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from dynamo_megatron.tracking.progress import FIELDS, LEGEND, step_line

# The clock moves while the program sleeps and at no other time, so that no load of the machine is shown.
CLOCK = """
import time
now = 1000.0
def sleep(seconds):
    global now
    now += seconds
time.sleep, time.monotonic, time.time = sleep, lambda: now, lambda: now
from dynamo_megatron.tracking.progress import Progress
"""
RUN = f"""{CLOCK}
progress = Progress(100)
progress.phase("loading data", unit="rows")
progress.count(12000)
time.sleep(0.3)
progress.phase("starting server")
progress.start(11)
for step in (12, 13):
    progress.phase("generate", 256)
    progress.count(100, 5000)
    time.sleep(0.5)
    progress.count(180, 6000)
    progress.say(f"step {{step}} is done")
    progress.step_done(step)
progress.phase("save")
progress.close()
progress.close()
"""


def in_terminal(program: str, width: int) -> list[str]:
    """Every state of the live line."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
    os.close(ours)
    assert process.wait() == 0, written
    states = written.decode().replace("\n", "\r").split("\r")
    assert max(map(len, states)) <= width  # nothing wraps
    return [state.rstrip() for state in states if state.strip()]


def first_with(states: list[str], *words: str) -> str:
    return next(state for state in states if all(word in state for word in words))


def test_a_run_in_a_terminal():
    states = in_terminal(RUN, 70)
    assert first_with(states, "loading data").startswith("loading data 0 rows")
    assert first_with(states, "after step 11 of 100: generate", "0/256")
    assert first_with(states, "after step 12 of 100: generate", "180/256", "6,000 tokens")
    assert first_with(states, "after step 13 of 100: save")
    assert "step 12 is done" in states and "step 13 is done" in states


def test_files_get_a_line_for_each_phase_of_the_start():
    done = subprocess.run([sys.executable, "-P", "-c", RUN], capture_output=True, text=True, check=True)
    phases = "loading data 12,000 rows: 0.3 s\nstarting server: 0.0 s\n"
    assert (done.stdout, done.stderr) == (f"{phases}step 12 is done\nstep 13 is done\n", "")


STEP = {
    **{"step": 7, "reward/mean": 0.25, "reward/success": 0.5, "policy/entropy": 1.25, "allocation/n_min": 2},
    **{"allocation/n_max": 24, "rollout/response_length_mean": 345.6, "policy/loss": -0.0123, "policy/grad_norm": 0.5},
    **{"rollout/logprob_gap_mean": 1e-6, "time/step": 83.4, "time/generate": 60.0, "time/logprobs": 1.5},
    **{"time/update": 20.0, "time/weight_sync": 1.25, "time/evaluate": 0.0, "time/save": 0.5, "time/other": 0.15},
    **{"reward/unique_answers": 0.75, "rollout/distinct_4grams": 0.875},
}


def test_without_a_terminal_a_step_s_line_has_all_fields():
    assert step_line(STEP, 100) == (
        "step   7/100  reward  0.250  loss -0.0123  grad  0.500  time  83.40  gap 1e-06  entropy 1.250  len   345.6"
        "  solved 0.500  unique 0.750  4grams 0.875  n  2..24   gen  60.00  upd  20.00  sync   1.25  logp   1.50"
        "  eval   0.00  save   0.50  other   0.15"
    )
    ahead = {key: value for key, value in STEP.items() if "gap" not in key} | {"rollout/staleness_mean": 0.5}
    assert "  time  83.40  stale 0.50  entropy 1.250  " in step_line(ahead, 100)
    of_critic = {"time/values": 0.5, "time/critic": 8.0}
    assert "  upd  20.00  values   0.50  critic   8.00  sync   1.25  " in step_line(STEP | of_critic, 100)
    without = {key: value for key, value in STEP.items() if "unique" not in key and "4grams" not in key}
    assert "  solved 0.500  n  2..24 " in step_line(without, 100)


@pytest.mark.parametrize(
    ("width", "labels"),
    [(80, "reward loss grad time gap"), (160, "reward loss grad time gap entropy len solved unique 4grams n")],
)
def test_a_terminal_gets_the_important_fields(width, labels):
    line = step_line(STEP, 100, width)
    assert len(line) <= width and [word for word in line.split() if word in FIELDS] == labels.split()
    assert all(f" {label}: " in LEGEND for label in FIELDS)
