"""Which signals are only for the ranks, and what is asked of Linux and the C library: which processes end together.
Light, since small processes import it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

ASK_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)  # the ranks; SLURM sends them to every process of a job
FOR_THE_RANKS = (signal.SIGINT, *ASK_TO_STOP)
END = signal.SIGUSR2  # ends the processes between a rank and its servers; SIGHUP would not: nohup ignores it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int, parent: int) -> None:
    """Asks Linux to send this process signal `number` when `parent` (a pid) ends. Raises OSError.

    What counts is the end of the thread that started this process: start such processes from a main thread.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """From now on a descendant of this process whose parent ends becomes a child of this process and not of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def give_back_freed_memory(step: int) -> None:
    """Returns the freed pages of the heap to the system, every 16 steps. By itself glibc returns only those at the
    heap's end. Steps of different lengths leave holes that later ones do not fit in, so that a rank grows by 5 to 10 %
    in 500 steps without a leak. For 130 MB of holes this takes 11 ms, and the next step, which fills them again,
    another 46 ms (of 0.87 s, two ranks on a CPU)."""
    if step % 16 == 0:
        _libc.malloc_trim(0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@contextlib.contextmanager
def keeping(*numbers: int) -> Iterator[None]:
    """Processes that are started in this context, and those that they start, never get the signals `numbers`. It is for
    signals that ask the ranks to save and stop, for which the ranks need their servers."""
    from multiprocessing import resource_tracker  # not above: the guard of every reward worker imports this module

    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # else multiprocessing starts it before its first child, and unblocks SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
