"""Runs a server's command. When the command or the guard's parent ends, kills and cleans up everything that is left.

    python -P -m dynamo_megatron.rollout.guard FOLDER... -- COMMAND...

A parent-death signal reaches one process only. SGLang's scheduler arms its own late, after half a minute of imports: a
server killed while it starts would leave the scheduler behind. The guard watches the read end of a pipe instead. It
also removes what a killed server cannot: its temporary FOLDERs and its segments of shared memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from dynamo_megatron.runtime.log_files import bound_log, copy_output
from dynamo_megatron.runtime.process_signals import die_with_parent

POLL_EVERY = 0.5  # seconds
KILLED_WITHIN = 8.0  # seconds for killed processes to end; one in an uninterruptible system call may not
COPIED_WITHIN = 1.0  # seconds for the last output to reach the log; a process outside the group may hold the pipe open
LOOK_EVERY = 2.0  # seconds between looks at the shared memory in use: a process that has ended maps none
SHARED_MEMORY = "/dev/shm/"


def main(folders: list[str], command: list[str]) -> int:
    """Returns the command's exit code; a signal that killed the command kills this process too.

    SIGTERM, and the end of stdin (a pipe), kill the command: a clean exit takes SGLang seconds and gains nothing.
    SIGUSR1 is passed on: ranks save and stop, servers ignore it. The command's output comes through a pipe, so that a
    full disk does not affect it. Where stdout is a log, the log's size stays bounded.
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    on_death = functools.partial(die_with_parent, signal.SIGKILL, os.getpid())
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=on_death,
    )
    copying = threading.Thread(target=copy_output, args=(process.stdout.fileno(),), daemon=True)
    copying.start()
    # Only now: the command inherits that a server's SIGUSR1 is ignored, which a handler would undo.
    signal.signal(signal.SIGUSR1, lambda number, _: process.send_signal(number))
    segments: set[str] = set()
    look = 0.0
    while process.poll() is None and not asked and not select.select([sys.stdin], [], [], POLL_EVERY)[0]:
        if time.monotonic() > look:
            segments |= shared_memory_of(members(process.pid))
            bound_log(1)
            look = time.monotonic() + LOOK_EVERY
    segments |= shared_memory_of(members(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILLED_WITHIN
    # A killed process keeps its port and its memory until it has ended.
    while (left := members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    copying.join(COPIED_WITHIN)
    others = [pid for pid in processes() if pid not in left]
    for segment in segments - shared_memory_of(others):
        Path(segment).unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if process.returncode < 0 and process.returncode != -signal.SIGKILL:
        signal.signal(-process.returncode, signal.SIG_DFL)
    if process.returncode < 0:
        os.kill(os.getpid(), -process.returncode)
    return process.returncode


def processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            # comm, the second field, may hold anything, but ends with the last parenthesis: state, ppid, pgrp follow.
            state, _, pgrp = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(pid)
    return found


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Returns the files of POSIX shared memory that these processes map; none for another user's processes.

    Files are matched by inode: a semaphore is created under one name, which stays in the maps of the process that
    created it, and is renamed at once.
    """
    mapped = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if SHARED_MEMORY in line}
    found = set()
    for entry in os.scandir(SHARED_MEMORY) if mapped else ():
        with contextlib.suppress(OSError):  # it may go meanwhile
            if entry.stat(follow_symlinks=False).st_ino in mapped:
                found.add(entry.path)
    return found


if __name__ == "__main__":
    end = sys.argv.index("--")
    sys.exit(main(sys.argv[1:end], sys.argv[end + 1 :]))
