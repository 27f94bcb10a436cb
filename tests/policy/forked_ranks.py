"""Ranks that are forks of one process, which has imported Megatron once: starting them takes a moment."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dynamo_megatron.runtime.listening import free_port


def fork(body: Callable[[], object], log: Path) -> int:
    """Calls `body` in a fork of this process, with its output appended to `log`; returns the fork's pid."""
    pid = os.fork()
    if pid == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # as torch's CheckpointException is
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def fork_ranks(count: int, body: Callable[[], None], logs: Path) -> list[int]:
    """Starts `count` ranks that call `body` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; returns their pids.

    Their output goes to `logs`/rankN.log.
    """
    port = free_port()  # not one of those that connections get: another process may take it before rank 0 does

    def as_rank(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        body()

    return [fork(partial(as_rank, rank), logs / f"rank{rank}.log") for rank in range(count)]


def wait_for(pids: list[int], logs: Path) -> None:
    """Until all have ended. Raises AssertionError with the ends of their logs where one fails; that ends the others,
    which may wait for it."""
    codes: dict[int, int | None] = dict.fromkeys(pids)
    while waiting := [pid for pid, code in codes.items() if code is None]:
        for pid in waiting:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()):
            for pid in waiting:
                if codes[pid] is None:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    said = "\n".join(file.read_text()[-3000:] for file in sorted(logs.glob("rank*.log")))
    assert not any(codes.values()), f"{list(codes.values())}\n{said}"


def run_in_turn(cases_file: str, ranks: int, run: Callable) -> None:
    """Calls run(case, store) for each case of a JSON file, on its number of ranks; their logs lie beside the file."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from dynamo_megatron.runtime.coordination import connect_store

    logs = Path(cases_file).parent

    def body() -> None:
        torch.set_num_threads(1)
        store = connect_store(60)
        for number, case in enumerate(json.loads(Path(cases_file).read_text())):
            run(case, dist.PrefixStore(f"case{number}", store))
            dist.barrier()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    wait_for(fork_ranks(ranks, body, logs), logs)
