"""Runs a command, and ends its whole process group when whoever started the guard is gone.

    python -P -m dynamo_megatron.rollout.guard COMMAND...

A signal at the parent's death reaches one process only. SGLang's scheduler arms its own late, after half a minute of
imports: a server killed while it starts would leave it behind. The guard holds the read end of a pipe instead.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import subprocess
import sys

POLL_EVERY = 0.5  # seconds

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Asks Linux to send this process signal `number` when `parent` (a pid) ends.

    It is the thread that started this process whose end counts: start such processes from a main thread.
    """
    PR_SET_PDEATHSIG = 1
    if _libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def main(command: list[str]) -> int:
    """Returns the command's exit code; a signal that ended it ends this process too.

    Must lead its process group. SIGTERM is passed on to the command; stdin is the pipe to watch.
    """
    assert os.getpgid(0) == os.getpid(), "the guard kills its process group: it must lead one"
    on_death = functools.partial(die_with_parent, signal.SIGKILL, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=on_death)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while process.poll() is None:
        if select.select([sys.stdin], [], [], POLL_EVERY)[0]:
            os.killpg(0, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    if process.returncode < 0:
        signal.signal(-process.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -process.returncode)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
