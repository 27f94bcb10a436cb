"""Runs a command. When the command ends, or stdin does, kills all that the command has started.

    python -P -m dynamo_megatron.runtime.subreaper FD COMMAND...

stdin is a pipe that the parent holds open; the command inherits FD. A process group is not enough: a process that calls
setsid leaves it, and the children of a killed process become children of init. Here such orphans become children of
this process, so that all that the command has started is below this process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time

from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, adopt_orphans, die_with_parent

STDIN = 0
KILL_EVERY = 0.005  # seconds
KILLS = 600  # 3 s for killed processes to end; one in an uninterruptible system call may not


def main(descriptor: int, command: list[str]) -> int:
    """Returns the command's exit code; a signal that killed the command kills this process too."""
    adopt_orphans()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, *FOR_THE_RANKS):
        signal.signal(number, lambda *_: None)
    parent = os.getpid()
    if (child := os.fork()) == 0:
        die_with_parent(signal.SIGKILL, parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), STDIN)
        os.execv(command[0], command)
    os.close(descriptor)
    status = None
    while status is None and STDIN not in select.select([STDIN, woken], [], [])[0]:
        os.read(woken, 4096)
        status = _reap().get(child)
    for _ in range(KILLS):  # counted, not timed: if this process is itself held up, it has not killed meanwhile
        if not (left := _below(parent)):
            break
        for pid in left:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_EVERY)
        _reap()
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (number := os.WTERMSIG(status)) != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(parent, number)
    return 0 if status is None else os.waitstatus_to_exitcode(status)


def _reap() -> dict[int, int]:
    """Reaps the children that have ended, most of them orphans; returns pid -> status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _below(pid: int) -> list[int]:
    """Returns the descendants of `pid`, without those that have ended and are not yet reaped."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
            # comm, the second field, may hold anything, but ends with the last parenthesis: state and parent follow.
            state, parent = stat.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    found = children.get(pid, [])
    for child in found:  # grows
        found += children.get(child, [])
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
