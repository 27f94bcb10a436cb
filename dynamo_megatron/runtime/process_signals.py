"""Which signals are for the ranks alone, who ends with whom, and who says why. Light: small processes import it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

ASK_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)  # the ranks; SLURM sends them to every process of a job
FOR_THE_RANKS = (signal.SIGINT, *ASK_TO_STOP)
END = signal.SIGUSR2  # what ends the processes between a rank and its servers instead: nohup ignores SIGHUP
LAUNCHER_PIPE = "DYNAMO_MEGATRON_LAUNCHER_PIPE"  # environment variable of ranks: the number of a file descriptor
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Asks Linux to send this process signal `number` when `parent` (a pid) ends.

    It is the thread that started this process whose end counts: start such processes from a main thread.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """What is below this process, and whose parent ends, becomes a child of this process and not of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def tell_launcher(message: str) -> bool:
    """Leaves it to the launcher to print `message`, a consequence of another rank's end, or the cause, which it may
    know. Returns False where it does not listen: `launch local` alone does."""
    if (pipe := os.environ.get(LAUNCHER_PIPE)) is None:
        return False
    os.write(int(pipe), f"{message}\n".encode())
    return True


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@contextlib.contextmanager
def keeping(*numbers: int) -> Iterator[None]:
    """What is started here, and what that starts, never gets the signals `numbers`: for what asks the ranks to save and
    stop, which takes servers."""
    from multiprocessing import resource_tracker  # not above: the subreaper of every reward worker imports this module

    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # else multiprocessing starts it before its first child, and unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
