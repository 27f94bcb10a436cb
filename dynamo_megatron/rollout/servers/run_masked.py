"""Runs a module as `python -m` does, and keeps the signals blocked here blocked in all processes that it starts.

    PYTHON -P run_masked.py [--fork] MODULE ARGUMENTS...

multiprocessing unblocks SIGTERM and SIGINT as it starts its resource tracker, which it does before a process's first
child: the server's own processes would receive a SIGTERM that is meant for the ranks. If a tracker runs already,
multiprocessing leaves the signals alone, and child processes inherit the tracker.

--fork: MODULE's multiprocessing forks where it asks for spawned processes. Each of these would import all of SGLang
again, which is more than half of the CPU time that a server takes to start. CUDA does not survive a fork, so this is
for our own interpreter on a machine without CUDA.

PYTHON may be another interpreter than ours, without this package, so this file imports only the standard library.
"""

import multiprocessing
import runpy
import signal
import sys
from multiprocessing import resource_tracker

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
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
