"""Runs a module as `python -m` does, and keeps the signals blocked here blocked in all processes that it starts.

    PYTHON -P run_masked.py [--fork] MODULE ARGUMENTS...

multiprocessing unblocks SIGTERM and SIGINT as it starts its resource tracker, which it does before a process's first
child: the server's own processes would receive a SIGTERM that is meant for the ranks. If a tracker runs already,
multiprocessing leaves the signals alone, and child processes inherit the tracker.

--fork: for SGLang under our own interpreter on a machine without CUDA, where imports are most of a server's start. Its
multiprocessing forks where it asks for spawned processes, each of which would import all of SGLang again; CUDA does not
survive a fork. torch.compile leaves functions as they are: on a CPU its import takes longer than they gain. And the
garbage collector does not look through all modules again and again while they are imported.

PYTHON may be another interpreter than ours, without this package, so this file imports only the standard library.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import runpy
import signal
import sys
from multiprocessing import resource_tracker

ENTRY = "sglang.srt.entrypoints.http_server"


def import_sglang() -> None:
    gc.disable()
    if "--enable-torch-compile" not in sys.argv:
        torch = importlib.import_module("torch")
        torch.compile = lambda model=None, **options: (lambda decorated: decorated) if model is None else model
    with contextlib.suppress(ImportError):  # MODULE's own import says it
        importlib.import_module(ENTRY)
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report a hundred lines of leaks at the exit
    gc.enable()


# Child processes do not import this file: `alter_sys` makes MODULE their main module.
if __name__ == "__main__":
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    del sys.argv[0]
    if sys.argv[0] == "--fork":
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda method, force=False: None  # SGLang asks for "spawn"
        del sys.argv[0]
        import_sglang()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
