"""Runs a command. When the command or the parent of this process ends, ends all that the command has started.

    python -P -m dynamo_megatron.runtime.guard [FOLDER...] -- COMMAND...

stdin is a pipe that the parent holds open; a parent-death signal would reach one process only, and a process that calls
setsid leaves its group. Orphans become children of this process, so that all that the command has started is below it.
What killed processes leave behind goes too: the FOLDERs, and their segments of shared memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, adopt_orphans, die_with_parent

NAME = "dynamo_megatron.runtime.guard"
STDIN = 0
LOOK_EVERY = 2.0  # seconds between looks at the shared memory in use: a process that has ended maps none
KILL_EVERY = 0.02  # seconds
KILLS = 1500  # 30 s for killed processes to end; one in an uninterruptible system call may not
SHARED_MEMORY = "/dev/shm/"


def guarded(command: Sequence[str], folders: Sequence[str] = (), **options: object) -> subprocess.Popen:
    """Starts `command` under a guard, in a session of its own: Ctrl-C in the terminal is for this process. It ends by
    `end`, or with this process. `options`: Popen's."""
    guard = [sys.executable, "-P", "-m", NAME, *folders, "--"]
    return subprocess.Popen([*guard, *command], stdin=subprocess.PIPE, start_new_session=True, **options)


def end(process: subprocess.Popen, seconds: float) -> None:
    """Ends a `guarded` command and all that it has started; what does not end in `seconds` is left behind, but for the
    command itself."""
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()


def main(folders: list[str], command: list[str]) -> int:
    """Returns the command's exit code; a signal that killed the command kills this process too.

    The command inherits the descriptors that this process was given. SIGUSR1 is passed on to it; SIGINT and SIGTERM are
    for the ranks alone.
    """
    adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in FOR_THE_RANKS:
        if signal.getsignal(number) != signal.SIG_IGN:  # the command inherits what is ignored; a handler would undo it
            signal.signal(number, lambda *_: None)
    listed = os.listdir("/proc/self/fd")  # through a descriptor that is closed again
    inherited = [int(number) for number in listed if int(number) > 2 and os.path.lexists(f"/proc/self/fd/{number}")]
    own = os.getpid()
    if (child := os.fork()) == 0:
        die_with_parent(signal.SIGKILL, own)
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
        os.execvp(command[0], command)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGUSR1, functools.partial(_pass_on, child))
    for number in inherited:
        os.close(number)
    segments: set[str] = set()
    ready, status = [], None
    while status is None and STDIN not in ready:
        ready = select.select([STDIN, woken], [], [], LOOK_EVERY)[0]
        if woken in ready:
            os.read(woken, 4096)
        status = _reap().get(child)
        segments |= shared_memory_of(below(own))
    end_below()
    for segment in segments - shared_memory_of(processes()):
        Path(segment).unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(own, number)
    return 0 if status is None else os.waitstatus_to_exitcode(status)


def end_below() -> None:
    """Kills all processes below this one, and waits until they have ended. Guards among them get half of the time to
    end by themselves, since they remove what killed processes leave."""
    for i in range(KILLS):  # counted, not timed: if this process is itself held up, it has not killed meanwhile
        _reap()
        if not (left := below(os.getpid())):
            return
        for pid in left:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if i > KILLS / 2 or NAME.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_EVERY)


def below(pid: int) -> list[int]:
    """Returns the descendants of `pid`, without those that have ended and are not yet reaped."""
    children: dict[int, list[int]] = {}
    for process in processes():
        with contextlib.suppress(OSError):
            # comm, the second field, may hold anything, but ends with the last parenthesis: state and parent follow.
            state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(process)
    found = children.get(pid, [])
    for child in found:  # grows
        found += children.get(child, [])
    return found


def processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


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


def _pass_on(child: int, number: int, _frame: object) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(child, number)


def _reap() -> dict[int, int]:
    """Reaps the children that have ended, most of them orphans; returns pid -> status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


if __name__ == "__main__":
    place = sys.argv.index("--")
    sys.exit(main(sys.argv[1:place], sys.argv[place + 1 :]))
