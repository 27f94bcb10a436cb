"""Ranks on this machine: one process each, stopped together.

    python -P -m dynamo_megatron.launcher.local RANKS OUTPUT_DIR ARGUMENTS

The ranks are in process groups of their own, so that a terminal's Ctrl-C reaches only this process, which passes it on
once. They die with this process (PR_SET_PDEATHSIG), even when it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dynamo_megatron.runtime.cores import choose_threads, usable_cores
from dynamo_megatron.runtime.guard import below, end_below
from dynamo_megatron.runtime.listening import free_port
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS, adopt_orphans, die_with_parent

GRACE = 6.0  # seconds the other ranks have to end on their own once one has failed or Ctrl-C came
ORPHANS_GRACE = 18.0  # seconds for servers and workers of a killed rank: they are to be gone within half a minute


def run_ranks(arguments: Sequence[str], ranks: int, output_dir: Path) -> int:
    """Runs `dynamo-megatron ARGUMENTS`, a run in `output_dir`, in `ranks` local processes; returns its exit code.

    SIGTERM and SIGUSR1 are passed on (the ranks save and exit with 75), Ctrl-C too (exit code 130). Before the
    first step they end a rank: there is nothing to save.
    """
    adopt_orphans()  # of a killed rank: this process ends them
    received: list[int] = []  # signals, in the order in which they came

    def pass_on(number: int, _frame) -> None:
        received.append(number)
        # Rank 0 stops all; others that wait for it in torch's store would print a stack at a signal that they catch.
        for p in processes[:1] if number == signal.SIGUSR1 else processes:
            p.send_signal(number)

    processes: list[subprocess.Popen] = []
    for number in FOR_THE_RANKS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_RANKS)  # blocked by the process that this one has replaced
    if received:
        print(stopped_early(received[0], output_dir), file=sys.stderr, flush=True)
        return 130 if signal.SIGINT in received else 75
    port = free_port()
    for rank in range(ranks):
        processes.append(_start(arguments, rank, ranks, port))
    for number in list(received):  # which not all of them have got
        pass_on(number, None)
    deadline = first_bad = None
    while any(p.poll() is None for p in processes):
        bad = [(p.returncode, rank) for rank, p in enumerate(processes) if p.poll() not in (None, 0, 75)]
        if first_bad is None and bad:
            first_bad = min(bad)  # a signal, a negative code, before the failures that it caused
        if deadline is None and (bad or signal.SIGINT in received):
            deadline = time.monotonic() + (0.0 if first_bad == (2, 0) else GRACE)  # rank 0 refused, and has said why
        if deadline is not None and time.monotonic() > deadline:
            for p in processes:
                p.kill()
        time.sleep(0.05)
    _end_orphans()
    return _exit_code([p.returncode for p in processes], first_bad, received, output_dir)


def _start(arguments: Sequence[str], rank: int, ranks: int, port: int) -> subprocess.Popen:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    choose_threads(environment, max(1, usable_cores() // ranks))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dynamo_megatron.cli", *arguments],
        env=environment,
        preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
        process_group=0,
    )


def _exit_code(
    codes: Sequence[int], first_bad: tuple[int, int] | None, received: Sequence[int], output_dir: Path
) -> int:
    """Returns the exit code of ranks that have ended with `codes`; prints to stderr what no rank could. `first_bad`:
    (code, rank) of the first rank that failed; `received`: the signals that arrived, in order."""
    if signal.SIGINT in received:
        if codes[0] not in (0, 75, 130):  # else it has said so itself; it may have died of another rank's end
            print(f"interrupted; {_after_a_stop(output_dir)}", file=sys.stderr, flush=True)
        return 130
    code, rank = first_bad or min((c, r) for r, c in enumerate(codes))
    if received and -code in (*received, signal.SIGTERM):  # before the rank had anything to save
        if codes[0] < 0:  # else it has said so itself
            print(stopped_early(received[0], output_dir), file=sys.stderr, flush=True)
        return 75
    if code < 0:  # a rank that fails by itself has said why
        next_start = _after_a_stop(output_dir)
        print(f"rank {rank} was ended by {signal.Signals(-code).name}; {next_start}", file=sys.stderr, flush=True)
        return 1
    return 2 if 2 in codes else code or max(codes)  # where one rank refuses, the others fail


def stopped_early(number: int, output_dir: Path) -> str:
    """Returns the message for a run that a signal stopped while it started."""
    return f"stopped by {signal.Signals(number).name} while it started; {_after_a_stop(output_dir)}"


def _after_a_stop(output_dir: Path) -> str:
    from dynamo_megatron.rollout.retention import after_a_stop  # numpy among others: not for as long as the ranks run

    return after_a_stop(output_dir)


def _end_orphans() -> None:
    """Waits for the processes that the ranks have left behind: they end by themselves, and remove their files. Those
    that do not are killed, at once where only torch's shared-memory manager is left: it stays for as long as a server
    that stays up has a tensor of a rank."""
    deadline = time.monotonic() + ORPHANS_GRACE
    while time.monotonic() < deadline and any(map(_will_end, below(os.getpid()))):
        time.sleep(0.05)
    end_below()


def _will_end(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/comm").read_text().startswith("torch_shm_manag")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(run_ranks(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2])))
